"""The call of a decoder layer by transformers and its call of attention, in the terms of fused layers.

Owns: the shape of a layer's heads, and the order of their numbers: kernels rotate halves of a head only, so
the weights of families that rotate neighbours are reordered.
Never: computes a layer (cpu/layer.py, gpu/triton_layer.py), or finds out how one is called
(layer_replacement.py).

Shapes: D numbers of a head, H heads, N outputs and K inputs of a projection.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import LayerShape
from worker.model.layer_parts import LayerNorm, LayerParts, RmsNorm, Unrecognised
from worker.model.linear import Segment

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each [1, T, R], as transformers' models hand them to their layers."""


class Pairing(Enum):
    """The two numbers of a head that are rotated together."""

    HALVES = "first half with second half"
    NEIGHBOURS = "each even one with the next"


class AngleOrder(Enum):
    """The order in which a model passes one angle for each pair of numbers."""

    TWICE = "all, and all again"
    IN_PAIRS = "each twice"


class Rotary(NamedTuple):
    """The rotation of queries and keys by their position."""

    rotated_dim: int
    """The count of rotated numbers of a head, from the first on."""
    pairing: Pairing
    order: AngleOrder


class HeadShape(NamedTuple):
    """The heads of a merged query, key and value projection."""

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def segments(self) -> tuple[Segment, Segment, Segment]:
        """The outputs of the projection, which are divided among ranks by whole heads."""
        return (
            Segment(self.num_query_heads * self.key_dim, self.key_dim),
            Segment(self.num_kv_heads * self.key_dim, self.key_dim),
            Segment(self.num_kv_heads * self.value_dim, self.value_dim),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """The call of a layer, and its call of attention."""

    layer_idx: int
    shape: LayerShape
    options: AttentionOptions
    rotary: Rotary | None
    """The rotation; None if queries and keys are not rotated, whatever the layer is given."""
    is_shard: bool = False
    """Whether its products with the residual are parts, to be summed over all ranks."""

    @property
    def rotated_dim(self) -> int:
        return 0 if self.rotary is None else self.rotary.rotated_dim


def head_shape(parts: LayerParts, call: LayerCall) -> HeadShape:
    """Count the query heads. Raises Unrecognised if the projections are not those of the heads alone."""
    shape = call.shape
    mixer = parts.mixer
    num_attended = mixer.output.num_inputs
    heads = HeadShape(num_attended // shape.value_dim, shape.num_heads, shape.key_dim, shape.value_dim)
    num_rows = sum(segment.num_outputs for segment in heads.segments)
    if mixer.query_key_value.num_outputs != num_rows or num_attended % shape.value_dim:
        raise Unrecognised("its projections are not those of its heads alone")
    for norm, num_heads in (
        (mixer.query_norm, heads.num_query_heads),
        (mixer.key_norm, heads.num_kv_heads),
    ):
        if norm is not None and len(norm.weight_H) not in (heads.key_dim, num_heads * heads.key_dim):
            raise Unrecognised("its norms of queries and keys are neither of a head nor of all")
    return heads


def norms_all_heads(norm: RmsNorm | None, heads: HeadShape) -> bool:
    """Tell whether a norm of queries or keys takes all heads of a token as one."""
    return norm is not None and len(norm.weight_H) != heads.key_dim


def in_halves(parts: LayerParts, call: LayerCall) -> LayerParts:
    """Reorder the numbers of each head where neighbours are rotated, since kernels rotate halves.

    Queries and keys change alike, and their products not at all.
    """
    if call.rotary is None or call.rotary.pairing is Pairing.HALVES:
        return parts
    heads, rotated_dim = head_shape(parts, call), call.rotary.rotated_dim
    mixer, device = parts.mixer, parts.mixer.query_key_value.weight.device
    order_D = torch.cat(
        [
            torch.arange(0, rotated_dim, 2, device=device),
            torch.arange(1, rotated_dim, 2, device=device),
            torch.arange(rotated_dim, heads.key_dim, device=device),
        ]
    )
    num_rotated_heads = heads.num_query_heads + heads.num_kv_heads
    starts_H1 = torch.arange(num_rotated_heads, device=device).unsqueeze(1) * heads.key_dim
    rotated_N = (starts_H1 + order_D).reshape(-1)
    order_N = torch.arange(mixer.query_key_value.num_outputs, device=device)
    order_N[: len(rotated_N)] = rotated_N
    mixer = replace(
        mixer,
        query_key_value=mixer.query_key_value.reordered(order_N),
        query_norm=_reordered(mixer.query_norm, rotated_N),
        key_norm=_reordered(mixer.key_norm, rotated_N),
    )
    return replace(parts, mixer=mixer)


def _reordered(norm: RmsNorm | None, order_N: Tensor) -> RmsNorm | None:
    """Permute the norm's weights like the outputs: each head has the order of the first, shifted."""
    if norm is None:
        return None
    own_order = order_N[: len(norm.weight_H)]
    weight_H = norm.weight_H[own_order].contiguous()
    if isinstance(norm, LayerNorm):
        return replace(norm, weight_H=weight_H, bias_H=norm.bias_H[own_order].contiguous())
    return replace(norm, weight_H=weight_H)
