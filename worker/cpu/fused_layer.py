"""A decoder layer as one call of the kernels, in the place of transformers' own.

Owns: a layer's packed weights and the struct that points to them.
Never: decides whether the kernels compute what the layer did (surgery.py).

Shapes: T tokens, H numbers of a hidden state.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.attention.interface import AttentionOptions, active_executor
from worker.cpu.attention import CpuAttention, Rotation, attention_options
from worker.cpu.layer_parts import LayerParts, Projection, RmsNorm, Unrecognised
from worker.cpu.native import (
    CHeadShape,
    CLayer,
    CNorm,
    CRotation,
    Numbers,
    pack,
    pack_gate_up,
    pointer,
)
from worker.kv_cache import LayerShape


class Pairing(Enum):
    """Which numbers of a head are turned together."""

    HALVES = "first half with second half"
    NEIGHBOURS = "each even one with the next"


class Turning(NamedTuple):
    """How a layer turns queries and keys by their position."""

    rotated_dim: int
    """The first so many numbers of a head."""
    pairing: Pairing


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """How transformers calls a layer, and the layer calls attention."""

    layer_idx: int
    shape: LayerShape
    options: AttentionOptions
    turning: Turning | None
    """None: queries and keys are not turned, whatever the layer is given."""


class FusedLayer(nn.Module):
    """Runs only while a CpuAttention executes a step."""

    def __init__(self, parts: LayerParts, call: LayerCall, *, numbers: Numbers = Numbers.AS_THEY_ARE) -> None:
        super().__init__()
        heads = _head_shape(parts, call)
        if call.turning is not None and call.turning.pairing is Pairing.NEIGHBOURS:
            parts = _pair_halves(parts, heads, call.turning.rotated_dim)
        self._layer_idx = call.layer_idx
        self._turns = call.turning is not None
        self._kept: list[Any] = []  # what the struct points to
        sinks = None if call.options.sinks is None else call.options.sinks.float().contiguous()
        query_key_value = pack(*parts.query_key_value, numbers=numbers)
        attention_output = pack(*parts.attention_output, numbers=numbers)
        gate_up = pack_gate_up(parts.gate_NK, parts.up_NK, parts.activation, numbers=numbers)
        down = pack(*parts.down, numbers=numbers)
        self._kept += [sinks, query_key_value, attention_output, gate_up, down]
        self._c = CLayer(
            hidden_size=len(parts.down.weight_NK),
            attention_norm=self._norm(parts.attention_norm),
            query_key_value=query_key_value.c,
            heads=heads,
            rotation=CRotation(
                query_norm=self._norm(parts.query_norm, heads.key_dim),
                key_norm=self._norm(parts.key_norm, heads.key_dim),
                rotated_dim=0 if call.turning is None else call.turning.rotated_dim,
            ),
            attention=attention_options(call.options, sinks),
            attention_output=attention_output.c,
            after_attention_norm=self._norm(parts.after_attention_norm),
            mlp_norm=self._norm(parts.mlp_norm),
            gate_up=gate_up.c,
            down=down.c,
            after_mlp_norm=self._norm(parts.after_mlp_norm),
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: Rotation | None = None, **__: Any
    ) -> Tensor:
        """Compute [1, T, H] in place: nothing else of the model reads what a layer was given."""
        executor = active_executor()
        assert isinstance(executor, CpuAttention), "a fused layer has no other attention than the kernels'"
        rotation = position_embeddings if self._turns else None
        executor.run_layer(self._c, self._layer_idx, hidden_states[0], rotation)
        return hidden_states

    def _norm(self, norm: RmsNorm | None, size: int | None = None) -> CNorm:
        if norm is None:
            return CNorm(None, 0.0)
        if size is not None and len(norm.weight_H) != size:
            raise Unrecognised("it norms all heads of a token as one")
        self._kept.append(norm.weight_H)
        return CNorm(pointer(norm.weight_H), norm.epsilon)


def _head_shape(parts: LayerParts, call: LayerCall) -> CHeadShape:
    shape = call.shape
    num_attended = parts.attention_output.weight_NK.shape[1]
    heads = CHeadShape(num_attended // shape.value_dim, shape.num_heads, shape.key_dim, shape.value_dim)
    num_rows = (
        heads.num_query_heads + heads.num_kv_heads
    ) * heads.key_dim + shape.num_heads * shape.value_dim
    if len(parts.query_key_value.weight_NK) != num_rows or num_attended % shape.value_dim:
        raise Unrecognised("its projections are not those of its heads alone")
    return heads


def _pair_halves(parts: LayerParts, heads: CHeadShape, rotated_dim: int) -> LayerParts:
    """Reorder the numbers of each head, so that the kernels, which turn halves, turn neighbours.

    Queries and keys change alike, and their products not at all.
    """
    order_D = torch.cat(
        [
            torch.arange(0, rotated_dim, 2),
            torch.arange(1, rotated_dim, 2),
            torch.arange(rotated_dim, heads.key_dim),
        ]
    )
    starts_H1 = torch.arange(heads.num_query_heads + heads.num_kv_heads).unsqueeze(1) * heads.key_dim
    order_N = torch.arange(len(parts.query_key_value.weight_NK))
    order_N[: starts_H1.numel() * heads.key_dim] = (starts_H1 + order_D).reshape(-1)
    weight_NK, bias_N = parts.query_key_value
    return replace(
        parts,
        query_key_value=Projection(weight_NK[order_N], None if bias_N is None else bias_N[order_N]),
        query_norm=_reordered(parts.query_norm, order_D),
        key_norm=_reordered(parts.key_norm, order_D),
    )


def _reordered(norm: RmsNorm | None, order_D: Tensor) -> RmsNorm | None:
    if norm is None or len(norm.weight_H) != len(order_D):
        return norm
    return RmsNorm(norm.weight_H[order_D].contiguous(), norm.epsilon)
