"""The place of states in blocks.

    state of a sequence   | block 0                     | block 1                     | ...
    block                 | layer 0: inputs | rows 0..5 | rows 6..15 | layer 1: inputs| rows ...

A row is one value's numbers of all keys, float32: no recurrence mixes rows of a head, so that a state may be
cut between any two. Inputs of a convolution are cut between channels; of those side by side, each column of
inputs lies together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from sys import maxsize
from typing import NamedTuple

import torch

from worker.states.interface import StateShape

_ALIGNMENT = 64
"""Bytes of a line of the processor's cache."""
_CHANNELS_TOGETHER = 16
"""Channels that are never cut: a vector of the widest kind."""
_ROW_ITEM_BYTES = torch.float32.itemsize


class Run(NamedTuple):
    """Neighbouring rows of a state, or channels of a convolution, in one block."""

    first: int
    length: int
    stripe: int
    """Block among those of the sequence."""
    offset: int
    """Bytes."""

    @property
    def end(self) -> int:
        return self.first + self.length


@dataclass(frozen=True, slots=True)
class LayerRuns:
    """The place of one layer's state."""

    shape: StateShape
    channels: tuple[Run, ...]
    rows: tuple[Run, ...]


@dataclass(frozen=True)
class StateLayout:
    """Place of all layers' states, the same for every sequence.

    Raises ValueError for blocks that do not hold a row, or the inputs of the channels that are never cut.
    """

    shapes: dict[int, StateShape]
    """Keys are the layer_idx of the recurrent modules."""
    block_bytes: int

    @cached_property
    def layers(self) -> dict[int, LayerRuns]:
        return _place(self.shapes, _Writer(self.block_bytes))

    @cached_property
    def num_stripes(self) -> int:
        """Blocks that the state of one sequence takes."""
        runs = [run for layer in self.layers.values() for run in (*layer.channels, *layer.rows)]
        return 1 + max((run.stripe for run in runs), default=-1)


def whole_bytes(shapes: Mapping[int, StateShape]) -> int:
    """Count the bytes of a block that holds the state of a sequence uncut."""
    writer = _Writer(maxsize)
    _place(shapes, writer)
    return writer.offset


def _place(shapes: Mapping[int, StateShape], writer: "_Writer") -> dict[int, LayerRuns]:
    found = {}
    for layer_idx, shape in shapes.items():
        channel_bytes = shape.num_columns * shape.input_dtype.itemsize
        channels = writer.place(shape.num_channels, channel_bytes, together=_CHANNELS_TOGETHER)
        row_bytes = shape.key_dim * _ROW_ITEM_BYTES
        rows = writer.place(shape.num_heads * shape.value_dim, row_bytes, together=1)
        found[layer_idx] = LayerRuns(shape, channels, rows)
    return found


class _Writer:
    """The end of what was placed so far."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._stripe = self.offset = 0

    def place(self, num_items: int, item_bytes: int, *, together: int) -> tuple[Run, ...]:
        runs, first = [], 0
        while first < num_items:
            fits = (self._block_bytes - self.offset) // item_bytes // together * together
            if num_items - first <= (self._block_bytes - self.offset) // item_bytes:
                fits = num_items - first
            if not fits:
                if not self.offset:
                    raise ValueError(
                        f"a block of {self._block_bytes} bytes does not hold {together} times "
                        f"{item_bytes} bytes of a state"
                    )
                self._stripe, self.offset = self._stripe + 1, 0
                continue
            runs.append(Run(first, fits, self._stripe, self.offset))
            first += fits
            self.offset += -(-fits * item_bytes // _ALIGNMENT) * _ALIGNMENT
        return tuple(runs)
