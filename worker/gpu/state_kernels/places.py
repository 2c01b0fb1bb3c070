"""The place of states on a GPU, as kernels find it, and the sequences of a call.

Owns: the tables of each layer, made once: where a row of a state, or a channel of a convolution, lies in its
block.

Shapes: R sequences of the call, S blocks of a sequence's state, X rows or channels of a layer.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.devices.device import Device
from worker.states.interface import StateStep
from worker.states.state_layout import Run, StateLayout


class StateBatch(NamedTuple):
    """Sequences of one call, on the device. Those without tokens are padding, and are left alone."""

    are_decodes: bool
    """Whether token r is that of sequence r, or of padding."""
    query_starts_R: Tensor
    """[R + 1] int32."""
    seq_lens_R: Tensor
    """[R] int32, after this step: a sequence that is as long as its share begins with it."""
    blocks_RS: Tensor
    """int32. Block 0 is no sequence's, and takes nothing in."""
    keeps_states: bool = True

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens_R)


class LayerPlaces(NamedTuple):
    """Rows, or channels, of one layer in all blocks. Counts are of numbers of the pool's view."""

    pool: Tensor
    """Flat, in the dtype of what lies there."""
    block_stride: int
    table_FX: Tensor
    """int32, of each row or channel: its block among those of the sequence, its offset, and the distance to
    the next column of its inputs."""


class StatePlaces:
    """Places of all layers."""

    def __init__(self, pool_NE: Tensor, layout: StateLayout, device: Device) -> None:
        self._flat, self._block_bytes, self._device = pool_NE.view(-1), layout.block_bytes, device
        self.channels, self.rows = {}, {}
        for layer_idx, layer in layout.layers.items():
            shape = layer.shape
            self.channels[layer_idx] = self._places_of(layer.channels, shape.input_dtype, item_numel=1)
            self.rows[layer_idx] = self._places_of(layer.rows, torch.float32, item_numel=shape.key_dim)

    def _places_of(self, runs: tuple[Run, ...], dtype: torch.dtype, *, item_numel: int) -> LayerPlaces:
        parts = [np.empty((3, 0))]
        for run in runs:
            places = run.offset // dtype.itemsize + np.arange(run.length) * item_numel
            parts.append(np.stack([np.full(run.length, run.stripe), places, np.full(run.length, run.length)]))
        table_FX = self._device.tensor(np.concatenate(parts, axis=1).astype(np.int32))
        return LayerPlaces(self._flat.view(dtype), self._block_bytes // dtype.itemsize, table_FX)


def batch_of(step: StateStep, device: Device) -> StateBatch:
    """Bring the host's form of a step to the device."""
    query_lens_R = np.diff(step.query_starts)
    return StateBatch(
        are_decodes=step.num_decodes == int(step.query_starts[-1]),
        query_starts_R=device.tensor(step.query_starts.astype(np.int32)),
        seq_lens_R=device.tensor((query_lens_R + ~step.is_first_R).astype(np.int32)),
        blocks_RS=device.tensor(np.ascontiguousarray(step.blocks_RS, np.int32)),
        keeps_states=step.keeps_states,
    )
