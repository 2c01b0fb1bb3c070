"""What a decoder layer of transformers is made of, where it is made as most are.

Owns: the recognition of a pre-norm block with gated MLP, by the names of its modules and by what its norms
and its activation do to numbers. A wrong guess is found by surgery.py, which compares the results.
Never: knows a model family, or reads a layer's code.

Shapes: H numbers of a hidden state.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.cpu.native import WIDEST_VECTOR, Activation, can_pack

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
_SPLIT_ROWS, _MERGED_ROWS = ("q_proj", "k_proj", "v_proj"), ("qkv_proj",)
_SPLIT_MLP, _MERGED_MLP = ("gate_proj", "up_proj"), ("gate_up_proj",)
_ACTIVATION_NAMES = ("act_fn", "activation_fn")
# In the order in which they act. Four: before and behind attention, before and behind the MLP.
_NORM_NAMES = (
    ("input_layernorm", "post_attention_layernorm"),
    ("input_layernorm", "pre_feedforward_layernorm"),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
)


class Unrecognised(Exception):
    """The layer stays as it is; the text says what is unusual about it."""


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x * rsqrt(mean(x^2) + epsilon) * weight."""

    weight_H: Tensor
    """float32; the 1 that some families add is in it."""
    epsilon: float


class Projection(NamedTuple):
    """What a linear module multiplies by and adds. Outputs N, inputs K."""

    weight_NK: Tensor
    bias_N: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    attention_norm: RmsNorm
    query_key_value: Projection
    """Queries, keys and values of all heads, in this order."""
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    attention_output: Projection
    after_attention_norm: RmsNorm | None
    mlp_norm: RmsNorm
    gate_NK: Tensor
    up_NK: Tensor
    down: Projection
    activation: Activation
    after_mlp_norm: RmsNorm | None


def find_parts(layer: nn.Module) -> LayerParts:
    """Take a layer apart without changing it. Raises Unrecognised."""
    children = _children(layer)
    norm_names = next((each for each in _NORM_NAMES if {*each, "self_attn", "mlp"} == set(children)), None)
    if norm_names is None:
        raise Unrecognised(f"it consists of {', '.join(children) or 'nothing'}")
    attention, mlp = _children(children["self_attn"]), _children(children["mlp"])
    rows = _MERGED_ROWS if _MERGED_ROWS[0] in attention else _SPLIT_ROWS
    gate_up = _MERGED_MLP if _MERGED_MLP[0] in mlp else _SPLIT_MLP
    _refuse_others(attention, {*rows, "o_proj", "q_norm", "k_norm", "rotary_emb"}, "attention")
    _refuse_others(mlp, {*gate_up, "down_proj", *_ACTIVATION_NAMES}, "MLP")
    gates_and_ups = _merged([_projection(mlp, name) for name in gate_up])
    if gates_and_ups.bias_N is not None:
        raise Unrecognised("its MLP has biases")
    gate_NK, up_NK = gates_and_ups.weight_NK.chunk(2)
    if len(gate_NK) % WIDEST_VECTOR:
        raise Unrecognised(f"its MLP has {len(gate_NK)} gates")
    norms = [_rms_norm(children[name]) for name in norm_names]
    is_sandwich = len(norms) == 4
    return LayerParts(
        attention_norm=norms[0],
        query_key_value=_merged([_projection(attention, name) for name in rows]),
        query_norm=_rms_norm(attention["q_norm"]) if "q_norm" in attention else None,
        key_norm=_rms_norm(attention["k_norm"]) if "k_norm" in attention else None,
        attention_output=_projection(attention, "o_proj"),
        after_attention_norm=norms[1] if is_sandwich else None,
        mlp_norm=norms[2] if is_sandwich else norms[1],
        gate_NK=gate_NK,
        up_NK=up_NK,
        down=_projection(mlp, "down_proj"),
        activation=_activation(children["mlp"]),
        after_mlp_norm=norms[3] if is_sandwich else None,
    )


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Those that do anything when nothing is trained."""
    return {
        name: child
        for name, child in module.named_children()
        if not isinstance(child, nn.Dropout | nn.Identity)
    }


def _refuse_others(children: dict[str, nn.Module], known: set[str], whose: str) -> None:
    others = sorted(set(children) - known)
    if others:
        raise Unrecognised(f"its {whose} has {', '.join(others)}")


def _projection(children: dict[str, nn.Module], name: str) -> Projection:
    found = children.get(name)
    if type(found) is not nn.Linear:
        raise Unrecognised(f"its {name} is {'missing' if found is None else type(found).__name__}")
    if not can_pack(found.weight):
        raise Unrecognised(f"its {name} is {tuple(found.weight.shape)} {found.weight.dtype}")
    return Projection(found.weight.detach(), None if found.bias is None else found.bias.detach())


def _merged(projections: list[Projection]) -> Projection:
    """Side by side, in the order given."""
    if len(projections) == 1:
        return projections[0]
    weight_NK = torch.cat([each.weight_NK for each in projections])
    if all(each.bias_N is None for each in projections):
        return Projection(weight_NK, None)
    zeros = [each.weight_NK.new_zeros(len(each.weight_NK)) for each in projections]
    biases = [
        zero if each.bias_N is None else each.bias_N for each, zero in zip(projections, zeros, strict=True)
    ]
    return Projection(weight_NK, torch.cat(biases))


def _rms_norm(norm: nn.Module) -> RmsNorm:
    """Read a norm off what it does to a vector of ones."""
    parameters = list(norm.parameters())
    epsilon = next((getattr(norm, name) for name in _EPSILON_NAMES if hasattr(norm, name)), None)
    if len(parameters) != 1 or parameters[0].dim() != 1 or not isinstance(epsilon, float):
        raise Unrecognised(f"its {type(norm).__name__} is no root-mean-square norm")
    size = parameters[0].shape[0]
    if size % WIDEST_VECTOR:
        raise Unrecognised(f"its {type(norm).__name__} has {size} numbers")
    with torch.inference_mode():
        weight_H = deepcopy(norm).float()(torch.ones(1, size))[0] * (1 + epsilon) ** 0.5
    return RmsNorm(weight_H.contiguous(), epsilon)


def _activation(mlp: nn.Module) -> Activation:
    """Recognise the MLP's function by its values."""
    function = next((getattr(mlp, name) for name in _ACTIVATION_NAMES if hasattr(mlp, name)), None)
    if not callable(function):
        raise Unrecognised("its MLP has no activation")
    x = torch.linspace(-6, 6, 97)
    found = function(x)
    if torch.allclose(found, functional.silu(x), atol=1e-6):
        return Activation.SILU
    if torch.allclose(found, functional.gelu(x, approximate="tanh"), atol=1e-6):
        return Activation.GELU_TANH
    raise Unrecognised(f"its activation is {type(function).__name__}")
