"""Mixtures of experts: their parts, and modules of our own in the place of transformers'.

Owns: the reading of experts modules that declare their layout, as transformers' experts interface asks; the
gate, found by its values; and a trial of each kind on the module's own weights.
Never: the router, or the products (cpu/cpu_experts.py, gpu/triton_experts.py).

Shapes: T tokens, K experts per token, E experts, H numbers of a hidden state, I gates of an expert.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.model.layer_parts import GateActivation, Unrecognised
from worker.model.linear import Linear, PlainWeight, merge

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


class Experts(NamedTuple):
    """The weights of all experts of a layer; views of any strides, whatever the layout was."""

    gate_ENH: Tensor
    """[E, I, H]"""
    up_ENH: Tensor
    """[E, I, H], of the same strides."""
    gate_bias_EN: Tensor | None
    up_bias_EN: Tensor | None
    down_EHI: Tensor
    down_bias_EH: Tensor | None
    gate: Gate

    def gate_up(self, expert: int) -> Linear:
        """Return the merged gates and ups of one expert, copied and without their biases."""
        return merge(
            [Linear.of(PlainWeight(weight_ENH[expert])) for weight_ENH in (self.gate_ENH, self.up_ENH)]
        )

    def down(self, expert: int) -> Linear:
        """Return the way down of one expert, copied where it is transposed, without its bias."""
        return Linear.of(PlainWeight(self.down_EHI[expert].contiguous()))


@dataclass(slots=True)
class ReplacedExperts:
    """The number of layers with experts, of those replaced, and why others were not."""

    num_found: int = 0
    num_replaced: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of all experts that declare their layout."""
    for name, module in model.named_modules():
        if all(hasattr(module, attribute) for attribute in _LAYOUT):
            yield name, module


def read_experts(module: Any) -> Experts:
    """Take experts apart without copying their weights. Raises Unrecognised."""
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
    return Experts(gate_ENH, up_ENH, gate_bias, up_bias, down, down_bias, _find_gate(module))


def _gates_and_ups(module: Any, merged: Tensor) -> tuple[Tensor, Tensor]:
    """Split dimension 1 into halves, or into the even and the odd."""
    if module.is_concatenated:
        gates, ups = merged.chunk(2, dim=1)
        return gates, ups
    return merged[:, ::2], merged[:, 1::2]


def _find_gate(module: Any) -> Gate:
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


def check_experts(ours: nn.Module, module: Any) -> None:
    """Compute some tokens both ways. Raises Unrecognised if they differ."""
    weight: Tensor = module.down_proj
    generator = torch.Generator().manual_seed(_SEED)
    num_experts, hidden_size = weight.shape[0], weight.shape[1 if not module.is_transposed else 2]
    num_chosen = min(4, num_experts)
    scores_TE = torch.rand((_NUM_TOKENS, num_experts), generator=generator).to(weight.device)
    scores_TK, ids_TK = scores_TE.topk(num_chosen)
    hidden_TH = torch.randn((_NUM_TOKENS, hidden_size), generator=generator).to(weight)
    with torch.inference_mode():
        expected_TH = module(hidden_TH.clone(), ids_TK, scores_TK.to(weight.dtype)).float()
        found_TH = ours(hidden_TH, ids_TK, scores_TK.to(weight.dtype)).float()
    errors = (found_TH - expected_TH).norm(dim=-1) / expected_TH.norm(dim=-1)
    error = float(errors.max().nan_to_num(torch.inf))
    if error > _TOLERANCE[weight.dtype]:
        raise Unrecognised(f"its experts compute something else (error {error:.1e})")


def replace_experts(model: nn.Module, make: Callable[[Experts], nn.Module]) -> ReplacedExperts:
    """Put modules of our own in the place of experts that compute the same.

    `make` may raise Unrecognised. Weights may move: each layer's old ones are freed before the next.
    """
    done = ReplacedExperts()
    for name in [name for name, _ in find_experts(model)]:
        module = model.get_submodule(name)
        done.num_found += 1
        try:
            ours = make(read_experts(module))
            check_experts(ours, module)
        except Unrecognised as unusual:
            done.reasons[str(unusual)] += 1
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            done.reasons[f"its experts cannot be computed alone ({type(error).__name__})"] += 1
        else:
            model.set_submodule(name, ours.eval())
            done.num_replaced += 1
    return done
