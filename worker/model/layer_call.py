"""The call of a decoder layer by transformers and its call of attention, in the terms of fused layers.

Owns: the shape of a layer's heads, and the order of their numbers: kernels rotate halves of a head only, so
the weights of families that rotate neighbours are reordered.

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
from worker.states.interface import StateShape

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
    is_gated: bool = False
    """Whether each query is followed by a gate of the same size, which weighs what its head attends to."""

    @property
    def query_dim(self) -> int:
        """Count the numbers of a query and its gate."""
        return 2 * self.key_dim if self.is_gated else self.key_dim

    @property
    def segments(self) -> tuple[Segment, Segment, Segment]:
        """The outputs of the projection, which are divided among ranks by whole heads."""
        return (
            Segment(self.num_query_heads * self.query_dim, self.query_dim),
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
    state: StateShape | None = None
    """State of a layer that recurs and does not attend: `shape` and `options` say nothing then."""
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
    if mixer.query_key_value.num_outputs == _num_rows(gated := heads._replace(is_gated=True)):
        heads = gated
    if mixer.query_key_value.num_outputs != _num_rows(heads) or num_attended % shape.value_dim:
        raise Unrecognised("its projections are not those of its heads alone")
    if heads.is_gated and heads.key_dim != heads.value_dim:
        raise Unrecognised("its gates are not as large as its values")
    for norm, num_heads in (
        (mixer.query_norm, heads.num_query_heads),
        (mixer.key_norm, heads.num_kv_heads),
    ):
        if norm is not None and len(norm.weight_H) not in (heads.key_dim, num_heads * heads.key_dim):
            raise Unrecognised("its norms of queries and keys are neither of a head nor of all")
        if heads.is_gated and norms_all_heads(norm, heads):
            raise Unrecognised("it norms all heads of a token as one, with gates between them")
    return heads


def _num_rows(heads: HeadShape) -> int:
    return sum(segment.num_outputs for segment in heads.segments)


def norms_all_heads(norm: RmsNorm | None, heads: HeadShape) -> bool:
    """Tell whether a norm of queries or keys takes all heads of a token as one."""
    return norm is not None and len(norm.weight_H) != heads.key_dim


def in_kernel_order(parts: LayerParts, call: LayerCall) -> LayerParts:
    """Reorder outputs of the projections as kernels read them.

    Gates stand behind all queries. Where neighbours are rotated, the numbers of each head are reordered:
    kernels rotate halves. Queries and keys change alike, and their products not at all.
    """
    if call.state is not None:
        return _ungrouped(parts, call.state)
    heads = head_shape(parts, call)
    rotates_halves = call.rotary is None or call.rotary.pairing is Pairing.HALVES
    if rotates_halves and not heads.is_gated:
        return parts
    mixer, device = parts.mixer, parts.mixer.query_key_value.weight.device
    order_D = torch.arange(heads.key_dim, device=device)
    if call.rotary is not None and not rotates_halves:
        turned_R = order_D[: call.rotary.rotated_dim]
        order_D = torch.cat([turned_R[::2], turned_R[1::2], order_D[len(turned_R) :]])
    num_queries, num_rotated = heads.num_query_heads, heads.num_query_heads + heads.num_kv_heads
    starts_H = torch.arange(num_rotated, device=device) * heads.key_dim
    gates_N = order_D[:0]
    if heads.is_gated:
        starts_H[:num_queries] *= 2
        starts_H[num_queries:] += num_queries * heads.key_dim
        gates_HD = starts_H[:num_queries, None] + torch.arange(
            heads.key_dim, 2 * heads.key_dim, device=device
        )
        gates_N = gates_HD.reshape(-1)
    rotated_HD = starts_H.unsqueeze(1) + order_D
    rotated_N = torch.cat(
        [rotated_HD[:num_queries].reshape(-1), gates_N, rotated_HD[num_queries:].reshape(-1)]
    )
    order_N = torch.arange(mixer.query_key_value.num_outputs, device=device)
    order_N[: len(rotated_N)] = rotated_N
    mixer = replace(
        mixer,
        query_key_value=mixer.query_key_value.reordered(order_N),
        query_norm=_reordered(mixer.query_norm, rotated_N),
        key_norm=_reordered(mixer.key_norm, rotated_N),
    )
    return replace(parts, mixer=mixer)


def num_groups_of(state: StateShape) -> int:
    """Count the groups of heads that share a key and a query."""
    return (state.num_channels - state.num_heads * state.value_dim) // (2 * state.key_dim)


def _ungrouped(parts: LayerParts, state: StateShape) -> LayerParts:
    """Let all queries stand before all keys, values and gates of a recurrence; parts of a step likewise."""
    mixer, recurrence = parts.mixer, parts.mixer.recurrence
    if recurrence is None or not recurrence.is_by_group:
        return parts
    num_groups, num_sharing = num_groups_of(state), state.num_heads // num_groups_of(state)
    values = num_sharing * state.value_dim
    rows, steps = mixer.query_key_value, recurrence.steps
    mixer = replace(
        mixer,
        query_key_value=rows.reordered(
            _by_part(num_groups, (state.key_dim, state.key_dim, values, values)).to(rows.weight.device)
        ),
        recurrence=replace(
            recurrence,
            steps=steps.reordered(_by_part(num_groups, (num_sharing, num_sharing)).to(steps.weight.device)),
        ),
    )
    return replace(parts, mixer=mixer)


def _by_part(num_groups: int, sizes: tuple[int, ...]) -> Tensor:
    """Order outputs that stand by group, each with parts of these sizes, by part."""
    by_group_GN = torch.arange(num_groups * sum(sizes)).view(num_groups, -1)
    ends = torch.tensor(sizes[:-1]).cumsum(0).tolist()
    return torch.cat([part_GN.reshape(-1) for part_GN in by_group_GN.tensor_split(ends, dim=1)])


def _reordered(norm: RmsNorm | None, order_N: Tensor) -> RmsNorm | None:
    """Permute the norm's weights like the outputs: each head has the order of the first, shifted."""
    if norm is None:
        return None
    own_order = order_N[: len(norm.weight_H)]
    weight_H = norm.weight_H[own_order].contiguous()
    if isinstance(norm, LayerNorm):
        return replace(norm, weight_H=weight_H, bias_H=norm.bias_H[own_order].contiguous())
    return replace(norm, weight_H=weight_H)
