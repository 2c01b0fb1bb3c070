"""Mixtures of experts: their parts, and modules of our own in the place of transformers'.

Owns: the reading of experts modules that declare their layout, as transformers' experts interface asks; the
gate, found by its values; and a trial of each kind on the module's own weights.

Shapes: T tokens, K experts per token, E experts, H numbers of a hidden state, I gates of an expert.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.devices.weight_life import lent_to
from worker.machine import trim_heaps
from worker.model.layer_parts import GateActivation, Unrecognised, read_activation
from worker.model.linear import Axis, Cut, Linear, PlainWeight, Segment, merge
from worker.ranks.ranks import Ranks

_LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "down_proj")
_NUM_TOKENS = 5
_SEED = 12
# Error over size of a token's result: rounding between the two products is most of it.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Gate(NamedTuple):
    """The function of a gate and its up: act(min(gate, limit)) * (up within +-limit, + up_offset).

    The activation is SILU, its exponent scaled by `alpha`, or GELU_TANH.
    """

    activation: GateActivation
    alpha: float = 1.0
    limit: float = float("inf")
    up_offset: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self == Gate(self.activation)

    @property
    def is_gelu(self) -> bool:
        return self.activation is GateActivation.GELU_TANH

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + self.up_offset
        if self.is_gelu:
            return functional.gelu(gate, approximate="tanh") * up
        return gate * torch.sigmoid(self.alpha * gate) * up


class ExpertLinears(Protocol):
    """The experts of a layer, each as two linear layers with the gate between them."""

    @property
    def gate(self) -> Gate: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def num_identities(self) -> int:
        """Count the experts behind these that return what they are given."""

    def gate_up(self, expert: int) -> Linear:
        """Return the merged gates and ups of one expert: all gates, then all ups."""

    def down(self, expert: int) -> Linear:
        """Return the way down of one expert."""


class Experts(NamedTuple):
    """The plain weights of all experts of a layer; views of any strides, whatever the layout was.

    See ExpertLinears.
    """

    gate_ENH: Tensor
    """[E, I, H]"""
    up_ENH: Tensor
    """[E, I, H], of the same strides."""
    gate_bias_EN: Tensor | None
    up_bias_EN: Tensor | None
    down_EHI: Tensor
    down_bias_EH: Tensor | None
    gate: Gate
    num_identities: int = 0

    @property
    def num_experts(self) -> int:
        return len(self.down_EHI)

    def gate_up(self, expert: int) -> Linear:
        """Return the merged gates and ups of one expert, copied."""
        parts = ((self.gate_ENH, self.gate_bias_EN), (self.up_ENH, self.up_bias_EN))
        return merge([_linear(weights_ENK[expert], biases, expert) for weights_ENK, biases in parts])

    def down(self, expert: int) -> Linear:
        """Return the way down of one expert, copied where it is transposed."""
        return _linear(self.down_EHI[expert].contiguous(), self.down_bias_EH, expert)


def shard_experts(experts: Experts, ranks: Ranks) -> Experts:
    """Copy a rank's gates and ups of each expert; see ExpertShards. Raises Unrecognised."""
    num_gates = experts.gate_ENH.shape[1]
    if num_gates % ranks.size:
        raise Unrecognised(f"its experts have {num_gates} gates, which cannot be divided by {ranks.size}")
    size = num_gates // ranks.size
    own = slice(ranks.rank * size, (ranks.rank + 1) * size)

    def part(of: Tensor) -> Tensor:
        return of[:, own].clone(memory_format=torch.contiguous_format)

    return experts._replace(
        gate_ENH=part(experts.gate_ENH),
        up_ENH=part(experts.up_ENH),
        gate_bias_EN=None if experts.gate_bias_EN is None else part(experts.gate_bias_EN),
        up_bias_EN=None if experts.up_bias_EN is None else part(experts.up_bias_EN),
        down_EHI=part(experts.down_EHI.transpose(1, 2)).transpose(1, 2),
        down_bias_EH=experts.down_bias_EH if ranks.rank == 0 else None,  # it is added once
    )


class ExpertShards:
    """A rank's gates and ups of each expert; the sums of its downs are those of all ranks once reduced.

    See ExpertLinears. Raises Unrecognised where the gates cannot be divided.
    """

    def __init__(self, experts: ExpertLinears, ranks: Ranks, *, size_multiple: int) -> None:
        num_gates = experts.gate_up(0).num_outputs // 2
        if num_gates % (ranks.size * size_multiple):
            raise Unrecognised(
                f"its experts have {num_gates} gates, no multiple of {ranks.size} ranks times {size_multiple}"
            )
        self.gate, self.num_experts = experts.gate, experts.num_experts
        self.num_identities = experts.num_identities
        self._experts, self._ranks = experts, ranks
        self._halves = (Segment(num_gates, size_multiple),) * 2

    def gate_up(self, expert: int) -> Linear:
        return self._shard(self._experts.gate_up(expert).in_segments(self._halves), Axis.OUTPUTS)

    def down(self, expert: int) -> Linear:
        return self._shard(self._experts.down(expert), Axis.INPUTS)

    def cuts(self) -> tuple[Cut, Cut]:
        """Say which part of each product of an expert this rank computes."""
        place = (self._ranks.rank, self._ranks.size)
        gate_up = self._experts.gate_up(0).in_segments(self._halves).cut(*place, Axis.OUTPUTS)
        return gate_up, self._experts.down(0).cut(*place, Axis.INPUTS)

    def _shard(self, linear: Linear, axis: Axis) -> Linear:
        try:
            return linear.shard(self._ranks.rank, self._ranks.size, axis)
        except ValueError as uneven:
            raise Unrecognised(f"its experts cannot be divided by {self._ranks.size}: {uneven}") from uneven


class SummedExperts(nn.Module):
    """A shard of each expert of a layer, whose sums are those of all ranks."""

    def __init__(self, shards: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.shards, self._ranks = shards, ranks

    def forward(self, hidden_TH: Tensor, expert_ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        """Return the weighed sum of the outputs of each token's experts: [T, H]."""
        sums_TH: Tensor = self.shards(hidden_TH, expert_ids_TK, scores_TK).contiguous()
        self._ranks.reduce(sums_TH)
        return sums_TH


def _linear(weight_NK: Tensor, bias_EN: Tensor | None, expert: int) -> Linear:
    return Linear.of(PlainWeight(weight_NK), None if bias_EN is None else bias_EN[expert])


@dataclass(slots=True)
class ReplacedExperts:
    """The number of layers with experts, of those replaced, and why others were not."""

    num_found: int = 0
    num_replaced: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of all experts that declare their layout, have `as_experts`, or identities."""
    for name, module in model.named_modules():
        if declares_layout(module) or hasattr(module, "as_experts") or _has_identities(module):
            yield name, module


def _has_identities(module: nn.Module) -> bool:
    """Tell whether some experts return what they are given, as LongCat's; these declare no layout."""
    return isinstance(getattr(module, "identity_expert", None), nn.Identity)


def declares_layout(module: nn.Module) -> bool:
    """Tell whether it is a module of transformers' experts interface, with plain weights."""
    return all(hasattr(module, attribute) for attribute in _LAYOUT)


def read_experts(module: Any) -> ExpertLinears:
    """Take experts apart without copying their weights. Raises Unrecognised."""
    if hasattr(module, "as_experts"):
        found: ExpertLinears = module.as_experts()
        return found
    return read_plain_experts(module)


def read_plain_experts(module: Any) -> Experts:
    """Take experts apart that declare their layout, or have identities. Raises Unrecognised."""
    if _has_identities(module):
        return _read_before_identities(module)
    if not module.has_gate:
        raise Unrecognised("its experts have no gates")
    if getattr(module, "has_post_expert_norm", False):
        raise Unrecognised("its experts have norms")
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate_ENH, up_ENH = _gates_and_ups(module, gate_up)
    gate_bias = up_bias = down_bias = None
    if module.has_bias:
        gate_bias, up_bias = _gates_and_ups(module, module.gate_up_proj_bias.detach())
        down_bias = module.down_proj_bias.detach()
    return Experts(gate_ENH, up_ENH, gate_bias, up_bias, down, down_bias, find_gate(module))


def _read_before_identities(module: Any) -> Experts:
    """Take experts apart whose first weights have unused rows for identities. Raises Unrecognised."""
    if module.down_proj is None:
        raise Unrecognised("all of its experts return what they are given")
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    gate_ENH, up_ENH = gate_up[: len(down)].chunk(2, dim=1)
    gate = Gate(read_activation(module))
    return Experts(gate_ENH, up_ENH, None, None, down, None, gate, len(gate_up) - len(down))


def _gates_and_ups(module: Any, merged: Tensor) -> tuple[Tensor, Tensor]:
    """Split dimension 1 into halves, or into the even and the odd."""
    if module.is_concatenated:
        gates, ups = merged.chunk(2, dim=1)
        return gates, ups
    return merged[:, ::2], merged[:, 1::2]


def find_gate(module: Any) -> Gate:
    """Recognise the gate by its values, with the numbers that the module has for limits and the like."""
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None:
        raise Unrecognised("its experts do not show their gate")
    points = torch.tensor(
        [-120.0, -30.0, -9.0, -2.5, -0.7, -0.04, 0.0, 0.02, 0.3, 1.9, 6.5, 12.0, 40.0, 150.0]
    )
    gates, ups = torch.cartesian_prod(points, points).unbind(dim=1)
    in_order = (gates, ups) if module.is_concatenated else (gates[:, None], ups[:, None])
    merged = torch.cat(in_order, dim=-1).reshape(1, -1)
    found = apply_gate(merged)[0]
    floats = [value for value in vars(module).values() if type(value) is float and value > 0]
    numbers = [float(value) for value in vars(module).values() if type(value) in (int, float) and value > 0]
    kinds = [Gate(GateActivation.GELU_TANH)]
    for alpha, limit, offset in product((1.0, *floats), (float("inf"), *numbers), (0.0, 1.0)):
        kinds.append(Gate(GateActivation.SILU, alpha, limit, offset))
    for gate in kinds:
        if torch.allclose(found, gate(gates, ups), rtol=1e-4, atol=1e-5):
            return gate
    raise Unrecognised("its experts have a gate of their own")


def check_experts(ours: nn.Module, module: Any, experts: ExpertLinears) -> None:
    """Compute some tokens both ways. Raises Unrecognised if they differ."""
    down = experts.down(0)
    dtype: torch.dtype = module.dtype if hasattr(module, "as_experts") else module.down_proj.dtype
    generator = torch.Generator().manual_seed(_SEED)
    num_experts = experts.num_experts + experts.num_identities
    num_chosen = min(4, num_experts)
    device = down.weight.device
    scores_TE = torch.rand((_NUM_TOKENS, num_experts), generator=generator).to(device)
    scores_TK, ids_TK = scores_TE.topk(num_chosen)
    hidden_TH = torch.randn((_NUM_TOKENS, down.num_outputs), generator=generator).to(device, dtype)
    with torch.inference_mode():
        expected_TH = module(hidden_TH.clone(), ids_TK, scores_TK.to(dtype)).float()
        found_TH = ours(hidden_TH, ids_TK, scores_TK.to(dtype)).float()
    errors = (found_TH - expected_TH).norm(dim=-1) / expected_TH.norm(dim=-1)
    error = float(errors.max().nan_to_num(torch.inf))
    if error > _TOLERANCE[dtype]:
        raise Unrecognised(f"its experts compute something else (error {error:.1e})")


def replace_experts(
    model: nn.Module, make: Callable[[ExpertLinears], nn.Module], device: torch.device
) -> ReplacedExperts:
    """Put modules of our own in the place of experts that compute the same.

    `make` may raise Unrecognised. Weights may move: each layer's old ones are freed before the next.
    """
    done = ReplacedExperts()
    for name in [name for name, _ in find_experts(model)]:
        module = model.get_submodule(name)
        trim_heaps()  # of the layer before
        done.num_found += 1
        try:
            with lent_to(device, module):
                experts = read_experts(module)
                ours = make(experts)
                check_experts(ours, module, experts)
        except Unrecognised as unusual:
            done.reasons[str(unusual)] += 1
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            done.reasons[f"its experts cannot be computed alone ({type(error).__name__})"] += 1
        else:
            model.set_submodule(name, ours.eval())
            done.num_replaced += 1
    return done
