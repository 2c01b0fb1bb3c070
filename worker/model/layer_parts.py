"""The parts of a decoder layer of transformers, where it is built like most.

Owns: where the layers of a model are, and the recognition of a layer's mixer and MLP: norms and MLPs by their
names, mixers as the module that is left, norms and the activation by the values they compute. A wrong guess
is found by layer_replacement.py, which compares the results.

Shapes: H numbers of a hidden state.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.model.linear import Cut, Linear, Segment, Weight, linear_of, merge
from worker.quantized.grouped_weight import GroupedWeight

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
_SPLIT_ROWS, _MERGED_ROWS = ("q_proj", "k_proj", "v_proj"), ("qkv_proj",)
_OUTPUT_NAMES = ("o_proj", "dense")
_SPLIT_MLP, _MERGED_MLP = ("gate_proj", "up_proj"), ("gate_up_proj",)
_ACTIVATION_NAMES = ("act_fn", "activation_fn")
_MLP_NAMES = ("mlp", "block_sparse_moe")
_RESIDUAL_MULTIPLIER_NAME = "residual_multiplier"
# Only large numbers show its effect, and a trial has none behind a norm.
_CLIPPING_NAME = "clip_qkv"


class _NormNames(NamedTuple):
    """Names of the norms before and behind attention, before and behind the MLP."""

    attention: str | None
    after_attention: str | None
    mlp: str | None
    after_mlp: str | None


_PARALLEL = _NormNames("input_layernorm", None, None, None)
_NORM_NAMES = (
    _NormNames("input_layernorm", None, "post_attention_layernorm", None),
    _NormNames("input_layernorm", None, "pre_feedforward_layernorm", None),
    _NormNames("attention_layernorm", None, "feedforward_layernorm", None),
    _PARALLEL,
    _NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    _NormNames(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    _NormNames(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    ),
    _NormNames("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
)


class Unrecognised(Exception):
    """A layer that stays as it is; the text names the unusual part."""


class GateActivation(IntEnum):
    """The function of the gates of a merged gate and up product. The CPU's kernels know the numbers."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenWeights:
    """The weights that a device's kernels can compute with."""

    formats: frozenset[str]
    """See Weight.format."""
    size_multiple: int
    """A divisor of the inputs of a product, of the numbers of a norm, a head or an MLP."""
    takes_layer_norms: bool = False
    find_hindrance: Callable[[Weight], str | None] = lambda _: None
    """Say why a weight of a format that is taken has no product all the same; None where it has one."""

    def include(self, linear: Linear) -> bool:
        """Tell whether the kernels can multiply by it."""
        is_taken = linear.weight.format in self.formats and linear.num_inputs % self.size_multiple == 0
        return is_taken and self.find_hindrance(linear.weight) is None

    def explain(self, linear: Linear) -> str:
        """Describe a layer that is not included, for a person."""
        weight = linear.weight
        hindrance = self.find_hindrance(weight) if weight.format in self.formats else None
        return f"{weight.shape} {weight.format}" + ("" if hindrance is None else f": {hindrance}")


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x * rsqrt(mean(x^2) + epsilon) * weight."""

    weight_H: Tensor
    """float32; the 1 that some families add is in it."""
    epsilon: float


@dataclass(frozen=True, slots=True)
class LayerNorm(RmsNorm):
    """RmsNorm of x - mean(x), plus bias."""

    bias_H: Tensor
    """float32"""


class GatedMlp(NamedTuple):
    """down(act(gate) * up)."""

    gate_up: Linear
    """Without a bias; of two segments, all gates and all ups."""
    down: Linear
    activation: GateActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """A convolution and a delta rule in the place of attention."""

    steps: Linear
    """Outputs of two numbers for each head: of what it takes in, then of what it forgets."""
    is_by_group: bool
    """Whether outputs of both projections stand by groups of heads, and not by what they are for."""
    convolution_CW: Tensor
    """Weights of each channel, in the model's dtype; as those that follow, on the host."""
    convolution_bias_C: Tensor | None
    decay_factors_H: Tensor
    """float32: the logarithm of a decay is a factor times the softplus of a step and its bias."""
    decay_biases_H: Tensor
    """float32"""
    norm: RmsNorm
    """The norm of each head, before it is weighed by the SiLU of its gates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """The part of a layer that mixes tokens, attention as a rule."""

    query_key_value: Linear
    """Queries, keys and values of all heads, in this order; behind each head's query there may be a gate.
    With a recurrence the gates come last."""
    query_norm: RmsNorm | None = None
    """The norm of each head; or of all heads of a token as one, if it has as many numbers."""
    key_norm: RmsNorm | None = None
    output: Linear
    recurrence: DeltaRule | None = None


class LinearNames(NamedTuple):
    """Names within a layer of the modules that its products were made of."""

    query_key_value: tuple[str, ...]
    attention_output: str
    gate_up: tuple[str, ...]
    """Empty where the MLP stays as it is."""
    down: str
    steps: tuple[str, ...]
    """See DeltaRule; empty for attention."""


class LayerCuts(NamedTuple):
    """The part of each product that one rank computes; of an MLP that stays, nothing is said."""

    query_key_value: Cut
    attention_output: Cut
    gate_up: Cut | None
    down: Cut | None
    steps: Cut | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """A layer taken apart. Norms that it does not have are None."""

    linear_names: LinearNames

    attention_norm: RmsNorm | None
    mixer: Mixer
    after_attention_norm: RmsNorm | None
    mlp_norm: RmsNorm | None
    mlp: GatedMlp | nn.Module
    """Or a module that stays as it is, such as a mixture of experts."""
    after_mlp_norm: RmsNorm | None
    residual_multiplier: float
    """A factor of the outputs of attention and MLP, where they are not normed."""
    mlp_is_parallel: bool
    """Whether the MLP has the same input as attention, and both outputs are added."""
    cuts: LayerCuts | None = None
    """The cuts of the whole layer's products that these are; None: they are whole."""

    def with_linears(self, change: Callable[[Linear], Linear]) -> "LayerParts":
        """Change each linear layer in the same way: round it, or return it to plain numbers."""
        mlp, recurrence = self.mlp, self.mixer.recurrence
        if isinstance(mlp, GatedMlp):
            mlp = mlp._replace(gate_up=change(mlp.gate_up), down=change(mlp.down))
        if recurrence is not None:
            recurrence = replace(recurrence, steps=change(recurrence.steps))
        return replace(
            self,
            mixer=replace(
                self.mixer,
                query_key_value=change(self.mixer.query_key_value),
                output=change(self.mixer.output),
                recurrence=recurrence,
            ),
            mlp=mlp,
        )


class _Names(NamedTuple):
    """Names of a layer's children: its norms, and the two modules between them."""

    mixer: str
    mlp: str
    norms: _NormNames


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the layers of a model by their names: the entries of its lists of modules that hold norms."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        is_list = isinstance(child, nn.ModuleList) and any(map(_is_norm, child.modules()))
        inner = dict(child.named_children()) if is_list else find_layers(child)
        found |= {f"{name}.{place}": layer for place, layer in inner.items()}
    return found


def find_parts(layer: nn.Module, taken: TakenWeights) -> LayerParts:
    """Take a layer apart without changing it. Raises Unrecognised."""
    children = _children(layer)
    names = _names(children)
    mixer_names, mixer = _mixer(children[names.mixer], taken)
    rows, steps, output = ([f"{names.mixer}.{name}" for name in some] for some in mixer_names)
    norms = [None if name is None else read_norm(children[name], taken) for name in names.norms]
    mlp = _mlp(children[names.mlp], taken)
    merged_or_split = _MERGED_MLP if _MERGED_MLP[0] in _children(children[names.mlp]) else _SPLIT_MLP
    return LayerParts(
        linear_names=LinearNames(
            query_key_value=tuple(rows),
            attention_output=output[0],
            gate_up=tuple(f"{names.mlp}.{name}" for name in merged_or_split)
            if isinstance(mlp, GatedMlp)
            else (),
            down=f"{names.mlp}.down_proj",
            steps=tuple(steps),
        ),
        attention_norm=norms[0],
        mixer=mixer,
        after_attention_norm=norms[1],
        mlp_norm=norms[2],
        mlp=mlp,
        after_mlp_norm=norms[3],
        residual_multiplier=float(getattr(layer, _RESIDUAL_MULTIPLIER_NAME, 1.0)),
        mlp_is_parallel=names.norms == _PARALLEL,
    )


def find_mlp(layer: nn.Module) -> nn.Module | None:
    """Return the module in the place of the MLP, whatever it consists of."""
    return next((child for name, child in layer.named_children() if name in _MLP_NAMES), None)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _names(children: dict[str, nn.Module]) -> _Names:
    """Find the names of the norms, of the MLP and of the remaining module, the mixer. Raises Unrecognised."""
    for mlp, norms in product(_MLP_NAMES, _NORM_NAMES):
        known = {*filter(None, norms), mlp}
        others = list(children.keys() - known)
        if known <= children.keys() and len(others) == 1 and not _is_norm(children[others[0]]):
            return _Names(others[0], mlp, norms)
    raise Unrecognised(f"it consists of {', '.join(children) or 'nothing'}")


class _MixerNames(NamedTuple):
    """Names of the linear layers of a mixer's products."""

    rows: tuple[str, ...]
    steps: tuple[str, ...]
    output: tuple[str]


def _mixer(module: nn.Module, taken: TakenWeights) -> tuple[_MixerNames, Mixer]:
    """Take a mixer apart, and name its products. Raises Unrecognised."""
    for names in _RECURRENCES:
        if hasattr(module, names.rows[0]) and hasattr(module, _DECAY_NAME):
            return names, _recurrent(module, names, taken)
    if getattr(getattr(module, "config", None), _CLIPPING_NAME, None) is not None:
        raise Unrecognised("it clips queries, keys and values")
    attention = _children(module)
    rows = _MERGED_ROWS if _MERGED_ROWS[0] in attention else _SPLIT_ROWS
    output = next((name for name in _OUTPUT_NAMES if name in attention), _OUTPUT_NAMES[0])
    _refuse_others(attention, {*rows, output, "q_norm", "k_norm", "rotary_emb"}, "attention")
    return _MixerNames(rows, (), (output,)), Mixer(
        query_key_value=_merged([_linear(attention, name, taken) for name in rows]),
        query_norm=read_norm(attention["q_norm"], taken) if "q_norm" in attention else None,
        key_norm=read_norm(attention["k_norm"], taken) if "k_norm" in attention else None,
        output=_linear(attention, output, taken),
    )


def _recurrent(module: nn.Module, names: _MixerNames, taken: TakenWeights) -> Mixer:
    """Take a gated delta rule apart. Raises Unrecognised."""
    parts = _children(module)
    _refuse_others(parts, {*names.rows, *names.steps, *names.output, "conv1d", "norm", "act"}, "recurrence")
    convolution, norm = parts.get("conv1d"), parts.get("norm")
    epsilon = next((getattr(norm, name) for name in _EPSILON_NAMES if hasattr(norm, name)), None)
    if not (isinstance(convolution, nn.Conv1d) and norm is not None and isinstance(epsilon, float)):
        raise Unrecognised("its recurrence has no convolution, or no norm")
    weight_V = norm.get_parameter("weight").detach()
    bias_C = convolution.bias
    return Mixer(
        query_key_value=_merged([_linear(parts, name, taken) for name in names.rows]),
        output=_linear(parts, names.output[0], taken),
        recurrence=DeltaRule(
            steps=_merged([_linear(parts, name, taken) for name in names.steps]),
            is_by_group=len(names.rows) == 1,
            convolution_CW=convolution.weight.detach().squeeze(1),
            convolution_bias_C=None if bias_C is None else bias_C.detach(),
            decay_factors_H=-module.get_parameter(_DECAY_NAME).detach().float().exp(),
            decay_biases_H=module.get_parameter(_DECAY_BIAS_NAME).detach().float(),
            norm=RmsNorm(weight_V.float().contiguous(), epsilon),
        ),
    )


_DECAY_NAME, _DECAY_BIAS_NAME = "A_log", "dt_bias"
_RECURRENCES = (
    _MixerNames(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), ("out_proj",)),
    _MixerNames(("in_proj_qkvz",), ("in_proj_ba",), ("out_proj",)),
)


def _mlp(module: nn.Module, taken: TakenWeights) -> GatedMlp | nn.Module:
    try:
        return _gated_mlp(module, taken)
    except Unrecognised:
        return module


def _gated_mlp(module: nn.Module, taken: TakenWeights) -> GatedMlp:
    mlp = _children(module)
    gate_up = _MERGED_MLP if _MERGED_MLP[0] in mlp else _SPLIT_MLP
    _refuse_others(mlp, {*gate_up, "down_proj", *_ACTIVATION_NAMES}, "MLP")
    gates_and_ups = _merged([_linear(mlp, name, taken) for name in gate_up])
    if gates_and_ups.has_bias:
        raise Unrecognised("its MLP has biases")
    num_gates = gates_and_ups.num_outputs // 2
    if num_gates % taken.size_multiple:
        raise Unrecognised(f"its MLP has {num_gates} gates")
    gates_and_ups = gates_and_ups.in_segments([Segment(num_gates), Segment(num_gates)])
    return GatedMlp(gates_and_ups, _linear(mlp, "down_proj", taken), read_activation(module))


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children that have an effect on results: no dropout, no identity."""
    return {
        name: child
        for name, child in module.named_children()
        if not isinstance(child, nn.Dropout | nn.Identity)
    }


def _refuse_others(children: dict[str, nn.Module], known: set[str], whose: str) -> None:
    others = sorted(set(children) - known)
    if others:
        raise Unrecognised(f"its {whose} has {', '.join(others)}")


def _linear(children: dict[str, nn.Module], name: str, taken: TakenWeights) -> Linear:
    found = children.get(name)
    linear = linear_of(found)
    if linear is None:
        raise Unrecognised(f"its {name} is {'missing' if found is None else type(found).__name__}")
    if not taken.include(linear):
        raise Unrecognised(f"its {name} is {taken.explain(linear)}")
    return linear


def _merged(linears: list[Linear]) -> Linear:
    """Put layers of one input side by side. Raises Unrecognised."""
    formats = sorted({each.weight.format for each in linears})
    are_codes = all(isinstance(each.weight, GroupedWeight) for each in linears)
    if len(formats) > 1 and not are_codes:
        raise Unrecognised(f"its projections of one input are {' and '.join(formats)}")
    try:
        return merge(linears)
    except ValueError as unequal:
        raise Unrecognised(f"its projections of one input cannot be merged: {unequal}") from unequal


def read_norm(norm: nn.Module, taken: TakenWeights) -> RmsNorm:
    """Read a norm's weight from its outputs for some vectors. Raises Unrecognised."""
    parameters = list(norm.parameters())
    epsilon = next((getattr(norm, name) for name in _EPSILON_NAMES if hasattr(norm, name)), None)
    shapes = {parameter.shape for parameter in parameters}
    if not 1 <= len(parameters) <= 2 or len(shapes) != 1 or parameters[0].dim() != 1:
        raise Unrecognised(f"its {type(norm).__name__} is no root-mean-square norm")
    if not isinstance(epsilon, float):
        raise Unrecognised(f"its {type(norm).__name__} has no epsilon")
    size = parameters[0].shape[0]
    if size % taken.size_multiple:
        raise Unrecognised(f"its {type(norm).__name__} has {size} numbers")
    with torch.inference_mode():
        exact = deepcopy(norm).float()
        ones_1H = torch.ones((1, size), device=parameters[0].device)
        of_zeros_H, of_ones_H = exact(0 * ones_1H)[0], exact(ones_1H)[0]
        if not of_zeros_H.any() and of_ones_H.any():
            return RmsNorm((of_ones_H * (1 + epsilon) ** 0.5).contiguous(), epsilon)
        if not taken.takes_layer_norms or not torch.allclose(of_ones_H, of_zeros_H, atol=1e-4):
            raise Unrecognised(f"its {type(norm).__name__} is no root-mean-square norm")
        signs_1H = ones_1H.clone()
        signs_1H[:, ::2] = -1
        weight_H = (exact(signs_1H)[0] - of_zeros_H) * signs_1H[0] * (1 + epsilon) ** 0.5
    return LayerNorm(weight_H.contiguous(), epsilon, of_zeros_H.contiguous())


def read_activation(mlp: nn.Module) -> GateActivation:
    """Recognise the MLP's function by its values. Raises Unrecognised."""
    function = next((getattr(mlp, name) for name in _ACTIVATION_NAMES if hasattr(mlp, name)), None)
    if not callable(function):
        raise Unrecognised("its MLP has no activation")
    x = torch.linspace(-6, 6, 97)
    found = function(x)
    if torch.allclose(found, functional.silu(x), atol=1e-6):
        return GateActivation.SILU
    if torch.allclose(found, functional.gelu(x, approximate="tanh"), atol=1e-6):
        return GateActivation.GELU_TANH
    raise Unrecognised(f"its activation is {type(function).__name__}")
