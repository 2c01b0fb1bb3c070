"""States of the sequences of a step in blocks, read and written by plain torch.

Shapes: R sequences of the step, decodes first; S blocks of a sequence's state; E bytes of a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from worker.states import rules
from worker.states.interface import Convolution, Recurrence, StateStep
from worker.states.state_layout import LayerRuns, Run, StateLayout


class RefStates:
    """A StateExecutor over the pool's rows of bytes, one for each block. One step at a time."""

    def __init__(self, pool_NE: Tensor, layout: StateLayout) -> None:
        self._layout = layout
        self._pool = pool_NE.view(-1)
        self._num_blocks = len(pool_NE)
        self._step: StateStep
        self._layer: LayerRuns

    def begin_step(self, step: StateStep) -> None:
        self._step = step

    def begin_layer(self, layer_idx: int) -> None:
        self._layer = self._layout.layers[layer_idx]

    def convolve(self, given: Convolution) -> Tensor:
        shape = self._layer.shape
        runs = [
            _Kept(run, self._view(run, shape.input_dtype, (shape.num_columns, run.length)))
            for run in self._layer.channels
        ]

        def compute(sequences: slice, tokens: slice) -> Tensor:
            earlier_NJC = torch.cat([self._read(kept, sequences) for kept in runs], dim=-1)
            out_TC = rules.convolve(given.of(tokens), earlier_NJC)
            for kept in runs:
                self._write(kept, sequences, earlier_NJC[..., kept.run.first : kept.run.end])
            return out_TC

        return self._of_all(compute)

    def recur(self, given: Recurrence) -> Tensor:
        shape = self._layer.shape
        runs = [
            _Kept(run, self._view(run, torch.float32, (run.length, shape.key_dim)))
            for run in self._layer.rows
        ]

        def compute(sequences: slice, tokens: slice) -> Tensor:
            state_NXK = torch.cat([self._read(kept, sequences) for kept in runs], dim=1)
            state_NHVK = state_NXK.view(-1, shape.num_heads, shape.value_dim, shape.key_dim)
            out_THV = rules.recur(given.of(tokens), state_NHVK)
            for kept in runs:
                self._write(kept, sequences, state_NXK[:, kept.run.first : kept.run.end])
            return out_THV

        return self._of_all(compute)

    def _of_all(self, compute: Callable[[slice, slice], Tensor]) -> Tensor:
        """Compute decodes together, and each other sequence by itself."""
        num_decodes, starts = self._step.num_decodes, self._step.query_starts
        parts = [compute(slice(0, num_decodes), slice(0, num_decodes))] if num_decodes else []
        for index in range(num_decodes, len(starts) - 1):
            parts.append(compute(slice(index, index + 1), slice(starts[index], starts[index + 1])))
        return torch.cat(parts)

    def _view(self, run: Run, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        """Show a run in every block of the pool."""
        return self._pool.view(dtype).as_strided(
            (self._num_blocks, *shape),
            (self._layout.block_bytes // dtype.itemsize, shape[1], 1),
            run.offset // dtype.itemsize,
        )

    def _read(self, kept: "_Kept", sequences: slice) -> Tensor:
        found = kept.view[self._blocks(kept, sequences)]
        is_first = torch.from_numpy(self._step.is_first_R[sequences]).to(found.device)
        return found.masked_fill_(is_first[:, None, None], 0)

    def _write(self, kept: "_Kept", sequences: slice, numbers: Tensor) -> None:
        if self._step.keeps_states:
            kept.view[self._blocks(kept, sequences)] = numbers

    def _blocks(self, kept: "_Kept", sequences: slice) -> Tensor:
        return torch.from_numpy(self._step.blocks_RS[sequences, kept.run.stripe]).to(kept.view.device)


class _Kept(NamedTuple):
    """A run, and its numbers in every block."""

    run: Run
    view: Tensor
