"""How transformers calls a decoder layer and the layer calls attention, in the terms of fused layers.

Owns: the shape of a layer's heads, and the order of their numbers: kernels turn halves of a head only, so
the weights of families that turn neighbours are reordered.
Never: computes a layer (cpu/fused_layer.py, gpu/fused_layer.py), or finds out how one is called (surgery.py).

Shapes: D numbers of a head, H heads, N outputs and K inputs of a projection.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import LayerShape
from worker.model.layer_parts import LayerNorm, LayerParts, Projection, RmsNorm, Unrecognised

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each [1, T, R], as transformers' models hand them to their layers."""


class Pairing(Enum):
    """Which numbers of a head are turned together."""

    HALVES = "first half with second half"
    NEIGHBOURS = "each even one with the next"


class AngleOrder(Enum):
    """How a model hands out one angle for each pair of numbers."""

    TWICE = "all, and all again"
    IN_PAIRS = "each twice"


class Turning(NamedTuple):
    """How a layer turns queries and keys by their position."""

    rotated_dim: int
    """The first so many numbers of a head."""
    pairing: Pairing
    order: AngleOrder


class HeadShape(NamedTuple):
    """What a merged query, key and value projection consists of."""

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """How transformers calls a layer, and the layer calls attention."""

    layer_idx: int
    shape: LayerShape
    options: AttentionOptions
    turning: Turning | None
    """None: queries and keys are not turned, whatever the layer is given."""

    @property
    def rotated_dim(self) -> int:
        return 0 if self.turning is None else self.turning.rotated_dim


def head_shape(parts: LayerParts, call: LayerCall) -> HeadShape:
    """Count the query heads. Raises Unrecognised if the projections are not those of the heads alone."""
    shape = call.shape
    num_attended = parts.attention_output.weight_NK.shape[1]
    heads = HeadShape(num_attended // shape.value_dim, shape.num_heads, shape.key_dim, shape.value_dim)
    num_rows = (
        heads.num_query_heads + heads.num_kv_heads
    ) * heads.key_dim + heads.num_kv_heads * heads.value_dim
    if len(parts.query_key_value.weight_NK) != num_rows or num_attended % shape.value_dim:
        raise Unrecognised("its projections are not those of its heads alone")
    for norm, num_heads in (
        (parts.query_norm, heads.num_query_heads),
        (parts.key_norm, heads.num_kv_heads),
    ):
        if norm is not None and len(norm.weight_H) not in (heads.key_dim, num_heads * heads.key_dim):
            raise Unrecognised("its norms of queries and keys are neither of a head nor of all")
    return heads


def norms_all_heads(norm: RmsNorm | None, heads: HeadShape) -> bool:
    """Tell whether a norm of queries or keys takes all heads of a token as one."""
    return norm is not None and len(norm.weight_H) != heads.key_dim


def in_halves(parts: LayerParts, call: LayerCall) -> LayerParts:
    """Reorder the numbers of each head, so that kernels, which turn halves, turn neighbours where those are.

    Queries and keys change alike, and their products not at all.
    """
    if call.turning is None or call.turning.pairing is Pairing.HALVES:
        return parts
    heads, rotated_dim = head_shape(parts, call), call.turning.rotated_dim
    weight_NK, bias_N = parts.query_key_value
    device = weight_NK.device
    order_D = torch.cat(
        [
            torch.arange(0, rotated_dim, 2, device=device),
            torch.arange(1, rotated_dim, 2, device=device),
            torch.arange(rotated_dim, heads.key_dim, device=device),
        ]
    )
    num_turned_heads = heads.num_query_heads + heads.num_kv_heads
    starts_H1 = torch.arange(num_turned_heads, device=device).unsqueeze(1) * heads.key_dim
    turned_N = (starts_H1 + order_D).reshape(-1)
    order_N = torch.arange(len(weight_NK), device=device)
    order_N[: len(turned_N)] = turned_N
    return replace(
        parts,
        query_key_value=Projection(weight_NK[order_N], None if bias_N is None else bias_N[order_N]),
        query_norm=_reordered(parts.query_norm, turned_N),
        key_norm=_reordered(parts.key_norm, turned_N),
    )


def _reordered(norm: RmsNorm | None, order_N: Tensor) -> RmsNorm | None:
    """By the order of as many heads as it norms at once: each head's is the first's, moved on."""
    if norm is None:
        return None
    own_order = order_N[: len(norm.weight_H)]
    weight_H = norm.weight_H[own_order].contiguous()
    if isinstance(norm, LayerNorm):
        return replace(norm, weight_H=weight_H, bias_H=norm.bias_H[own_order].contiguous())
    return replace(norm, weight_H=weight_H)
