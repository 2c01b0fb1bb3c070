"""The KV cache: one pool, block-major, given to the layers as strided views.

Owns: the layout of a block and the tensor behind it.
Source: PagedAttention, arXiv:2309.06180; blocks hold many layers, so that moving one is a single copy.

    pool   | block 0 (padding) | block 1 | block 2 | ...
    block  | layer 0: K, V | layer 1: K, V | ... | slack       all layers, or those of a stripe
    K      | head 0: page | head 1: page | ...
    page   | token 0: D numbers | token 1 | ... | token block_size - 1

Heads stand outside tokens, so that attention streams one head of a block without gaps. A block is
padded to a multiple of every page size in it; so the pages of one layer can be numbered with one
stride over the whole pool, although other layers' pages lie in between.

Numbers of one byte are floats (e4m3) that stand for themselves times a scale, one for the keys and one for
the values of a layer. Scales are powers of two: bfloat16 holds each product exactly.

Shapes: N blocks with block 0, H KV heads, S block size, D head size, P pages, R rows (one token of one head).
"""

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from sys import maxsize
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from scheduler.cache_groups import (
    ALL_TOKENS,
    CacheGroup,
    Lifetime,
    LifetimeKind,
    joint_lifetime,
    most_blocks,
)
from worker.states.interface import StateShape
from worker.states.state_layout import StateLayout, whole_bytes
from worker.worker_errors import StartupError

FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = 448.0
_HEADROOM = 4.0
"""Factor by which numbers may exceed the largest that was seen before they are cut off."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The keys and values that one layer keeps of each token, and for how long.

    Key and value sizes differ in some families.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    lifetime: Lifetime = ALL_TOKENS
    value_is_key_part: bool = False
    """Whether a value is the first numbers of its key, as of latents (latents.py), and takes no memory."""

    @property
    def numel(self) -> int:
        """Count the numbers of a token."""
        own_value_dim = 0 if self.value_is_key_part else self.value_dim
        return self.num_heads * (self.key_dim + own_value_dim)


class KeptShapes(NamedTuple):
    """Shapes of all that the layers of a model keep of a sequence, in the order of their numbers."""

    layers: dict[int, LayerShape]
    """With those of the keys of indexers behind them."""
    states: dict[int, StateShape]
    has_index_keys: bool = False
    together: tuple[tuple[int, ...], ...] = ()
    """Numbers of each layer that has several: it attends more than once, or has an indexer."""

    def with_beside(self, beside: "KeptShapes") -> "KeptShapes":
        """Append what a draft model keeps, under the numbers of `numbers_beside`. Raises StartupError.

        All its tokens are kept: it catches up from the first one, long after windows have passed it.
        """
        if beside.states and not self.states:
            raise StartupError(
                "the draft model has recurrent layers and the model none: its prefixes are found anywhere",
                fix="take a draft model without recurrent layers",
            )
        layers = {
            here: replace(beside.layers[there], lifetime=ALL_TOKENS)
            for there, here in numbers_beside(self.layers, beside.layers).items()
        }
        states = numbers_beside(self.states, beside.states).items()
        return self._replace(
            layers=self.layers | layers,
            states=self.states | {here: beside.states[there] for there, here in states},
        )


NOTHING_KEPT = KeptShapes({}, {})


def with_hidden_states(layers: dict[int, LayerShape], hidden_size: int, num_ranks: int) -> KeptShapes:
    """Append a layer for a hidden state of each token, in parts that divide the pages of the others.

    Each rank keeps some of the parts. Raises StartupError.
    """
    if hidden_size % num_ranks:
        raise StartupError(
            f"its hidden states of {hidden_size} numbers cannot be divided by {num_ranks} ranks",
            fix="ask for a number of ranks that divides them, or leave the head out",
        )
    dim = math.gcd(hidden_size // num_ranks, *(shape.key_dim for shape in layers.values()))
    states = LayerShape(hidden_size // dim, dim, dim, value_is_key_part=True)
    return KeptShapes(layers | {max(layers) + 1: states}, {})


def numbers_beside(layers: Iterable[int], beside: Iterable[int]) -> dict[int, int]:
    """Map the layers of a second model to numbers behind those of the first."""
    first = max(layers, default=-1) + 1
    return {there: first + place for place, there in enumerate(sorted(beside))}


class LayerGroup(NamedTuple):
    """Layers that have blocks of their own."""

    group: CacheGroup
    layers: tuple[int, ...]
    """Numbers of the layers, which are dealt to its stripes in turn."""


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The place of each layer's keys and values in a block. Counts are of numbers, not of bytes."""

    layers: dict[int, LayerShape]
    """Keys are the layer_idx of the model's attention modules."""
    block_size: int
    dtype: torch.dtype
    scales: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Scales of a layer's keys and values, where the dtype is FLOAT8."""
    state_shapes: dict[int, StateShape] = field(default_factory=dict)
    """States of recurrent layers, which fill blocks of the same size. Keys as in `layers`."""
    division: tuple[LayerGroup, ...] = ()
    """Groups of layers that have blocks of their own; layers that are not here have none in their stripes.
    Empty: all layers have the same blocks."""
    least_numel: int = 0
    """Numbers of a block that has layers of another model too."""
    least_state_blocks: int = 0
    """Blocks of a state that is larger in another stage, by number."""
    together: tuple[tuple[int, ...], ...] = ()
    """See KeptShapes."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Layers by how long they keep something of a token; a state comes last."""
        groups = tuple(each.group for each in self.division)
        if self.layers and not groups:
            groups = (CacheGroup(self.lifetime),)
        if self.states is None:
            return groups
        return (*groups, CacheGroup(Lifetime(LifetimeKind.FIXED), self.num_state_blocks))

    def most_blocks(self, num_tokens: int) -> int:
        """Count the blocks of a sequence whose prompt is computed."""
        return most_blocks(self.groups, num_tokens, block_size=self.block_size, num_step_tokens=1)

    def bytes_by_group(self, num_tokens: int) -> dict[str, int]:
        """Size of the blocks of a sequence whose prompt is computed, by groups of layers."""
        sizes = {"block_size": self.block_size, "num_step_tokens": 1}
        groups = self.groups
        return {each.name: self.block_bytes * most_blocks((each,), num_tokens, **sizes) for each in groups}

    @cached_property
    def stripes(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each stripe, of all groups one after the other."""
        if not self.division:
            return (tuple(self.layers),) if self.layers else ()
        dealt = []
        for group, layers in self.division:
            own = [layer_idx for layer_idx in layers if layer_idx in self.layers]
            dealt += [tuple(own[stripe :: group.num_stripes]) for stripe in range(group.num_stripes)]
        return tuple(dealt)

    @property
    def layer_numbers(self) -> list[int]:
        """Numbers of all layers that keep something, in their order."""
        return sorted({*self.layers, *self.state_shapes})

    def numbers_without(self, beside: KeptShapes) -> set[int]:
        """Numbers of the layers before those of another model. In a view, the first model's are negative."""
        numbers = {*_own(self.layers, beside.layers), *_own(self.state_shapes, beside.states)}
        return {number for number in numbers if number >= 0}

    @property
    def by_layer(self) -> list[tuple[int, ...]]:
        """Numbers of each layer that keeps something, in the order of layers."""
        alone = {*self.layer_numbers}.difference(*self.together)
        return sorted([*self.together, *((number,) for number in alone)])

    def only(self, places: Iterable[int]) -> "BlockLayout":
        """Keep the layers at these places in the order of all."""
        by_layer = self.by_layer
        own = [by_layer[place] for place in places]
        kept = {number for numbers in own for number in numbers}
        layers = {number: shape for number, shape in self.layers.items() if number in kept}
        states = {number: shape for number, shape in self.state_shapes.items() if number in kept}
        together = tuple(numbers for numbers in own if len(numbers) > 1)
        return replace(self, layers=layers, state_shapes=states, together=together)

    @property
    def storage(self) -> torch.dtype:
        """Dtype of pools: bytes where the numbers are such, since torch can copy rows of them."""
        return torch.uint8 if self.dtype is FLOAT8 else self.dtype

    @cached_property
    def offsets(self) -> dict[int, tuple[int, int]]:
        """Start of a layer's keys and of its values within a block."""
        offsets = {}
        for stripe in self.stripes:
            end = 0
            for layer_idx in stripe:
                shape = self.layers[layer_idx]
                keys_size = 0 if shape.value_is_key_part else shape.num_heads * shape.key_dim
                offsets[layer_idx] = (end, end + self.block_size * keys_size)
                end += self.block_size * shape.numel
        return offsets

    @cached_property
    def block_numel(self) -> int:
        if not self.layers:  # a block is a state
            return max(self.least_numel, -(-whole_bytes(self.state_shapes) // self.dtype.itemsize))
        sizes = (sum(self.layers[layer_idx].numel for layer_idx in stripe) for stripe in self.stripes)
        used = self.block_size * max(sizes)
        dims = [shape.key_dim for shape in self.layers.values()]
        dims += [shape.value_dim for shape in self.layers.values() if not shape.value_is_key_part]
        page_multiple = math.lcm(*(self.block_size * dim for dim in dims))
        return max(self.least_numel, math.ceil(used / page_multiple) * page_multiple)

    @property
    def block_bytes(self) -> int:
        return self.block_numel * self.dtype.itemsize

    @cached_property
    def states(self) -> StateLayout | None:
        """Place of a sequence's states in blocks; None where no layer is recurrent."""
        return StateLayout(self.state_shapes, self.block_bytes) if self.state_shapes else None

    @property
    def num_state_blocks(self) -> int:
        """Count the blocks of a sequence's state."""
        return max(self.least_state_blocks, 0 if self.states is None else self.states.num_stripes)

    @property
    def lifetime(self) -> Lifetime:
        """Lifetime of a block that has all layers."""
        return joint_lifetime([shape.lifetime for shape in self.layers.values()])


_Shape = TypeVar("_Shape")


def _own(shapes: dict[int, _Shape], beside: dict[int, _Shape]) -> dict[int, _Shape]:
    """Leave out the last layers, which are another model's."""
    return dict(list(shapes.items())[: len(shapes) - len(beside)])


def check_states(layout: BlockLayout) -> None:
    """Raise StartupError for blocks that are too small for the rows of a state."""
    try:
        _ = layout.num_state_blocks
    except ValueError as error:
        raise StartupError(str(error), fix="ask for a larger --block-size") from error


@dataclass(frozen=True, slots=True)
class PagedTensor:
    """The keys, or the values, of one layer, seen in three ways. All share the pool's memory."""

    blocks_NHSD: Tensor
    pages_PSD: Tensor
    """Page of block n and head h: n * pages_per_block + h. Other numbers are other layers' memory."""
    rows_RD: Tensor
    """Row of block n, head h, offset s: (n * pages_per_block + h) * block_size + s."""
    pages_per_block: int
    scale: float
    """A factor of the stored numbers; 1 unless they are of one byte."""

    def first_numbers(self, dim: int) -> "PagedTensor":
        """Show the first `dim` numbers of each row; rows stay as far apart as they are."""
        return replace(
            self,
            blocks_NHSD=self.blocks_NHSD[..., :dim],
            pages_PSD=self.pages_PSD[..., :dim],
            rows_RD=self.rows_RD[..., :dim],
        )

    def write(self, rows: Tensor, numbers_XD: Tensor) -> None:
        """Round numbers and put them into rows; larger ones become the largest."""
        target_RD = self.rows_RD
        if target_RD.dtype is FLOAT8:
            scaled = (numbers_XD.float() / self.scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
            target_RD, numbers_XD = target_RD.view(torch.uint8), scaled.to(FLOAT8).view(torch.uint8)
        target_RD.index_copy_(0, rows, numbers_XD)


def cache_dtype(word: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a word of --kv-cache-dtype stands for, where the model computes in `dtype`."""
    return FLOAT8 if word == "fp8" else dtype


def scale_for(largest: float) -> float:
    """Choose the power of two by which numbers up to `largest`, and some beyond, are those of FLOAT8."""
    return 2.0 ** math.ceil(math.log2(max(largest, 1e-6) * _HEADROOM / LARGEST_FLOAT8))


@dataclass(frozen=True, slots=True)
class LayerCache:
    keys: PagedTensor
    values: PagedTensor
    stripe: int = 0
    """The table of blocks that the layer's tokens are in."""


class KVCache:
    """The pool and its views. `pool_NE` is one row per block, as swapping and copying move them.

    `memory` is flat and zeroed, of (num_blocks + 1) * layout.block_numel numbers. Zeroed because slots
    that were never written are gathered too, and 0 * NaN is NaN even where the weight is 0.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, memory: Tensor) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.pool_NE = memory.view(layout.storage).view(num_blocks + 1, layout.block_numel)
        self.layers = {
            layer_idx: replace(self._layer_cache(layer_idx), stripe=stripe)
            for stripe, layers in enumerate(layout.stripes)
            for layer_idx in layers
        }

    @property
    def most_tokens(self) -> int:
        """Tokens of one sequence that has all blocks."""
        if not self.layout.stripes:
            return maxsize
        num_places = (self.num_blocks - self.layout.num_state_blocks) // len(self.layout.stripes)
        return num_places * self.layout.block_size

    @property
    def num_bytes(self) -> int:
        return self.pool_NE.numel() * self.layout.dtype.itemsize

    def view_beside(self, beside: KeptShapes) -> "KVCache":
        """Show the last layers under the numbers that a draft model has for them.

        The pool and its blocks are the same. The layout of the view has the shapes of keys and values, not
        their places, and the states of the model in their places, under negative numbers.
        """
        layout, view = self.layout, copy(self)
        numbers = numbers_beside(_own(layout.layers, beside.layers), beside.layers)
        view.layers = {there: self.layers[here] for there, here in numbers.items()}
        shapes = {there: layout.layers[here] for there, here in numbers.items()}
        own = _own(layout.state_shapes, beside.states)
        numbers = {-1 - here: here for here in own} | numbers_beside(own, beside.states)
        states = {there: layout.state_shapes[here] for there, here in numbers.items()}
        view.layout = replace(
            layout,
            layers=shapes,
            state_shapes=states if beside.states else {},
            least_numel=layout.block_numel,
        )
        return view

    def _layer_cache(self, layer_idx: int) -> LayerCache:
        shape = self.layout.layers[layer_idx]
        keys_offset, values_offset = self.layout.offsets[layer_idx]
        key_scale, value_scale = self.layout.scales.get(layer_idx, (1.0, 1.0))
        keys = self._paged(keys_offset, shape.num_heads, shape.key_dim)
        if shape.value_is_key_part:
            values, value_scale = keys.first_numbers(shape.value_dim), key_scale
        else:
            values = self._paged(values_offset, shape.num_heads, shape.value_dim)
        return LayerCache(replace(keys, scale=key_scale), replace(values, scale=value_scale))

    def _paged(self, offset: int, num_heads: int, dim: int) -> PagedTensor:
        block_size, block_numel = self.layout.block_size, self.layout.block_numel
        page = block_size * dim
        flat = self.pool_NE.view(-1).view(self.layout.dtype)
        num_pages = (flat.numel() - offset) // page
        return PagedTensor(
            blocks_NHSD=flat.as_strided(
                (self.num_blocks + 1, num_heads, block_size, dim), (block_numel, page, dim, 1), offset
            ),
            pages_PSD=flat.as_strided((num_pages, block_size, dim), (page, dim, 1), offset),
            rows_RD=flat.as_strided((num_pages * block_size, dim), (dim, 1), offset),
            pages_per_block=block_numel // page,
            scale=1.0,
        )
