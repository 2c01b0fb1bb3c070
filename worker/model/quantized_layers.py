"""Linear layers and mixtures of experts whose weights stay codes, as modules of a model.

Owns: their products in plain torch. A weight becomes numbers block by block, so that no more than a block of
it stands in memory as numbers; every family can be computed in this way, slowly.

Shapes: T tokens, K experts per token, P = T * K, H numbers of a hidden state, N outputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.memory_sizes import format_size
from worker.model.layer_parts import Unrecognised
from worker.model.linear import Linear
from worker.model.mixture import ExpertLinears, find_gate
from worker.quantized.grouped_weight import GroupedWeight

_GATES_AND_UPS = "gate_up_proj"
_GIVEN_ALL_TOKENS = "Llama4TextExperts"
_BLOCK_NUMBERS = 1 << 18
"""Numbers of a weight that are expanded at a time: 1 MiB of float32, which stays in a near cache."""
_are_products_skipped: ContextVar[bool] = ContextVar("are_products_skipped", default=False)


@contextmanager
def skipping_products() -> Iterator[None]:
    """Give zeros for products by codes, where a call is to show how layers are called and no more."""
    token = _are_products_skipped.set(True)
    try:
        yield
    finally:
        _are_products_skipped.reset(token)


class QuantizedLinear(nn.Module):
    """A linear layer without its weight until `fill` is called."""

    def __init__(self, replaced: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self.bias, self.dtype = replaced.bias, replaced.weight.dtype
        self.kind = ""
        """See GroupedWeight.kind: layers of different kinds are tried one by one (layer_replacement.py)."""
        self._weight: GroupedWeight | None = None
        self._read: Callable[[], GroupedWeight] | None = None

    @property
    def weight(self) -> Tensor:
        """Return a tensor without content: some models ask for the dtype."""
        return torch.empty((self.out_features, self.in_features), dtype=self.dtype, device="meta")

    @property
    def weight_codes(self) -> GroupedWeight:
        """The weight, once it is there."""
        if self._read is not None:
            return self._read()
        assert self._weight is not None
        return self._weight

    def fill(self, weight: GroupedWeight) -> None:
        """Take the weight."""
        self._weight, self._read, self.kind = weight, None, weight.kind

    def read_when_asked(self, read: Callable[[], GroupedWeight]) -> None:
        """Give the weight away, and read it again each time that it is asked for."""
        self._weight, self._read = None, read

    def keep(self) -> None:
        """Read a weight that was given away once and for all."""
        if self._read is not None:
            self.fill(self._read())

    def as_linear(self) -> Linear:
        return Linear.of(self.weight_codes, None if self.bias is None else self.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., K] to [..., N]."""
        if _are_products_skipped.get():
            return x.new_zeros((*x.shape[:-1], self.out_features))
        return multiply_by_codes(x, self.weight_codes, self.bias)


class QuantizedEmbedding(nn.Module):
    """An embedding in the place of transformers' own. Raises ValueError for one that does more."""

    def __init__(self, replaced: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = replaced.num_embeddings, replaced.embedding_dim
        self.dtype = replaced.weight.dtype
        self.scale: float | None = None
        if type(replaced) is not nn.Embedding:
            self.scale = getattr(replaced, "scalar_embed_scale", None)
            if self.scale is None:
                raise ValueError(f"it is a {type(replaced).__name__}")
        self._weight: GroupedWeight | None = None
        self._look_up: Callable[[Tensor], Tensor] | None = None

    @property
    def weight_codes(self) -> GroupedWeight:
        """The weight, once it is there."""
        assert self._weight is not None
        return self._weight

    def fill(self, weight: GroupedWeight) -> None:
        """Take the weight."""
        self._weight = weight

    def look_up_in(self, look_up: Callable[[Tensor], Tensor]) -> None:
        """Give the weight away: `look_up` knows its rows, indices [U] to numbers [U, H]."""
        self._look_up, self._weight = look_up, None

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up [...] to [..., H]."""
        ids_U, places = torch.unique(token_ids, return_inverse=True)
        if self._look_up is not None:
            numbers_UH = self._look_up(ids_U)
        else:
            numbers_UH = self.weight_codes.outputs(ids_U).dequantized()
        found = numbers_UH.to(self.dtype)[places]
        # Rounded as the model's own module rounds it.
        return found if self.scale is None else found * torch.tensor(self.scale, dtype=self.dtype)


class QuantizedExperts(nn.Module):
    """The experts of a layer in the place of transformers' own, whose layout of outputs they keep."""

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.num_experts: int = replaced.down_proj.shape[0]
        self.dtype: torch.dtype = replaced.down_proj.dtype
        self.is_concatenated: bool = replaced.is_concatenated
        self.is_transposed: bool = replaced.is_transposed
        self.first_parameter = _first_parameter(replaced)
        self.kind = ""
        self._replaced = [replaced.to("meta")]  # in a list, so that it is no child; for its gate
        self._gate_ups: list[GroupedWeight] = []
        self._downs: list[GroupedWeight] = []
        self.gate_up_proj_bias = replaced.gate_up_proj_bias if replaced.has_bias else None
        self.down_proj_bias = replaced.down_proj_bias if replaced.has_bias else None

    @property
    def weights(self) -> list[GroupedWeight]:
        """All weights, once they are there."""
        return [*self._gate_ups, *self._downs]

    def fill(self, gate_ups: list[GroupedWeight], downs: list[GroupedWeight]) -> None:
        """Take the weights: gates and ups, or ups, in the order of outputs of the replaced module."""
        self._gate_ups, self._downs = gate_ups, downs
        self.kind = gate_ups[0].kind

    def as_experts(self) -> ExpertLinears:
        """Return the experts as linear layers, which share memory with the module. Raises Unrecognised."""
        if self.first_parameter != _GATES_AND_UPS:
            raise Unrecognised("its experts have no gates")
        return _GroupedExperts(self)

    def forward(self, hidden_TH: Tensor, expert_ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        """Return the weighed sum of the outputs of each token's experts: [T, H]."""
        num_chosen, ids_P = expert_ids_TK.shape[1], expert_ids_TK.reshape(-1)
        outputs = hidden_TH.new_zeros((len(ids_P), hidden_TH.shape[1]))
        for expert in sorted(set(ids_P.tolist())):
            if expert < self.num_experts:  # one more stands for none
                places = (ids_P == expert).nonzero()[:, 0]
                outputs[places] = self._compute(expert, hidden_TH[places // num_chosen])
        weighed = outputs * scores_TK.reshape(-1, 1).to(outputs.dtype)
        return weighed.view(len(hidden_TH), num_chosen, -1).sum(dim=1)

    def _compute(self, expert: int, x: Tensor) -> Tensor:
        gate_up_bias, down_bias = (
            None if bias is None else bias[expert] for bias in (self.gate_up_proj_bias, self.down_proj_bias)
        )
        products, replaced = multiply_by_codes(x, self._gate_ups[expert], gate_up_bias), self._replaced[0]
        gated = replaced._apply_gate(products) if replaced.has_gate else replaced.act_fn(products)
        return multiply_by_codes(gated, self._downs[expert], down_bias)


class GivenAllTokens(QuantizedExperts):
    """Experts of a family that gives each of them all tokens, those of others as zeros (Llama 4)."""

    def as_experts(self) -> ExpertLinears:
        raise Unrecognised("its experts are given all tokens")

    def forward(self, hidden_PH: Tensor) -> Tensor:  # type: ignore[override]
        """Return [P, H]: outputs of the first expert for all tokens, then of the next; zeros for zeros."""
        hidden_ETH = hidden_PH.view(self.num_experts, -1, hidden_PH.shape[-1])
        outputs_ETH = torch.zeros_like(hidden_ETH)
        for expert, hidden_TH in enumerate(hidden_ETH):
            own = hidden_TH.any(dim=-1)
            outputs_ETH[expert, own] = self._compute(expert, hidden_TH[own])
        return outputs_ETH.view_as(hidden_PH)


def declare_layout(experts: Any) -> None:
    """Say how experts lie whose family does not, and whose products are of the usual form."""
    if type(experts).__name__ == _GIVEN_ALL_TOKENS:
        experts.has_gate = experts.is_transposed = experts.is_concatenated = True
        experts.has_bias = experts.has_post_expert_norm = False
        experts._apply_gate = partial(_gated, experts.act_fn)


def _gated(activation: Callable[[Tensor], Tensor], gates_and_ups: Tensor) -> Tensor:
    gates, ups = gates_and_ups.chunk(2, dim=-1)
    return activation(gates) * ups


def experts_for(replaced: Any) -> QuantizedExperts:
    """Make the module that stands in for transformers' own."""
    is_given_all = type(replaced).__name__ == _GIVEN_ALL_TOKENS
    return GivenAllTokens(replaced) if is_given_all else QuantizedExperts(replaced)


def _first_parameter(experts: Any) -> str:
    """Name the weights that a token is multiplied by first, of experts that declare their layout."""
    return _GATES_AND_UPS if experts.has_gate else "up_proj"


class _GroupedExperts:
    """ExpertLinears of a module whose experts are codes."""

    def __init__(self, module: QuantizedExperts) -> None:
        self._module = module
        self.gate = find_gate(module._replaced[0])
        self.num_experts, self.num_identities = module.num_experts, 0

    def gate_up(self, expert: int) -> Linear:
        weight, bias = self._module._gate_ups[expert], self._module.gate_up_proj_bias
        order_N = torch.arange(weight.num_outputs)
        if not self._module.is_concatenated:
            order_N = order_N.view(-1, 2).T.reshape(-1)
        return Linear.of(weight, None if bias is None else bias[expert].detach()).reordered(order_N)

    def down(self, expert: int) -> Linear:
        bias = self._module.down_proj_bias
        return Linear.of(self._module._downs[expert], None if bias is None else bias[expert].detach())


class Codes(NamedTuple):
    """The quantized weights of one kind in a model."""

    num_weights: int
    num_bytes: int
    first_module: str


def find_codes(model: nn.Module) -> dict[str, Codes]:
    """Count the weights of each kind that modules of this file compute; see GroupedWeight.kind."""
    found: dict[str, Codes] = {}
    for name, weight in _weights_of(model):
        count, num_bytes, first = found.get(weight.kind, Codes(0, 0, name))
        found[weight.kind] = Codes(count + 1, num_bytes + weight.num_bytes, first)
    return found


def find_kinds(model: nn.Module) -> dict[str, tuple[str, GroupedWeight]]:
    """Find the first module and weight of each kind."""
    found: dict[str, tuple[str, GroupedWeight]] = {}
    for name, weight in _weights_of(model):
        found.setdefault(weight.kind, (name, weight))
    return found


def describe_codes(loaded: dict[str, Codes], left: dict[str, Codes]) -> Iterator[str]:
    """Yield one line for each kind, for a person; `left` are those that no kernel took."""
    for kind, (num_weights, num_bytes, _) in loaded.items():
        slow = left.get(kind, Codes(0, 0, ""))
        line = f"{num_weights} weights of {kind}: {format_size(num_bytes)}"
        if slow.num_weights < num_weights:
            line += f", {num_weights - slow.num_weights} by kernels"
        if slow.num_weights:
            line += f", {slow.num_weights} made numbers at each step, slowly ({slow.first_module} first)"
        yield line


def _weights_of(model: nn.Module) -> Iterator[tuple[str, GroupedWeight]]:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module.weight_codes
        elif isinstance(module, QuantizedExperts):
            yield from ((name, weight) for weight in module.weights)


def multiply_by_codes(x: Tensor, weight: GroupedWeight, bias_N: Tensor | None) -> Tensor:
    """Multiply [..., K] to [..., N] in the dtype of `x`, some outputs at a time."""
    if _are_products_skipped.get():
        return x.new_zeros((*x.shape[:-1], weight.num_outputs))
    step = max(1, _BLOCK_NUMBERS // weight.num_inputs)
    parts = [
        functional.linear(x, weight.outputs(slice(start, start + step)).dequantized(x.dtype))
        for start in range(0, weight.num_outputs, step)
    ]
    product = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return product if bias_N is None else product + bias_N
