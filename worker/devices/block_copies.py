"""Copies between the device's pool of KV blocks and the host's, row by row."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[np.integer[Any]]


class Pools(NamedTuple):
    """Both ends of a swap. One row per block; N and M rows of E numbers."""

    device_NE: Tensor
    host_ME: Tensor


class RowCopy(NamedTuple):
    """Copy of one row of a pool to a row of the other."""

    source: int
    target: int


class BlockRun(NamedTuple):
    """Copy of rows that are neighbours in both pools."""

    source: int
    target: int
    num_blocks: int

    @property
    def source_rows(self) -> slice:
        return slice(self.source, self.source + self.num_blocks)

    @property
    def target_rows(self) -> slice:
        return slice(self.target, self.target + self.num_blocks)


class TouchedRows(NamedTuple):
    """Rows of the device's pool that a step may write, and may read."""

    written_W: Rows
    tables_RB: Rows
    """R tables, of which the step reads the first entries."""
    num_read_R: Rows

    def read(self) -> Rows:
        """List the rows that are read, in no order."""
        places_B = np.arange(self.tables_RB.shape[1])
        read: Rows = self.tables_RB[places_B < self.num_read_R[:, None]]
        return read


class PoolCopier(Protocol):
    """Copies between two pools, which keep steps from meeting a copy half-way."""

    def swap(self, out: Sequence[RowCopy], back: Sequence[RowCopy]) -> None:
        """Copy all of `out` to the host's pool, then all of `back` to the device's.

        The copies contain the results of all earlier steps. They may be done later, in the order given:
        only the steps of `step` may touch the pools meanwhile. Rows are not checked: one out of range
        corrupts memory.
        """

    def step(self, touched: TouchedRows) -> AbstractContextManager[None]:
        """Enter to launch a step that touches these rows of the device's pool, and no others.

        The step reads the rows that earlier copies brought, and overwrites no row before it was copied out.
        """


class PlainCopier:
    """PoolCopier whose copies are done when `swap` returns. Both pools are the host's memory."""

    def __init__(self, pools: Pools) -> None:
        # As bytes, through numpy: one memcpy per run. torch's copy_ costs 2 us more per call, and cuts
        # large copies among threads, where it waits for the slowest; memory is the limit, not cores.
        self._device_NE = pools.device_NE.view(torch.uint8).numpy()
        self._host_ME = pools.host_ME.view(torch.uint8).numpy()

    def swap(self, out: Sequence[RowCopy], back: Sequence[RowCopy]) -> None:
        for run in merge_runs(out):
            self._host_ME[run.target_rows] = self._device_NE[run.source_rows]
        for run in merge_runs(back):
            self._device_NE[run.target_rows] = self._host_ME[run.source_rows]

    def step(self, touched: TouchedRows) -> AbstractContextManager[None]:  # noqa: ARG002 - nothing is late
        return nullcontext()


def merge_runs(copies: Iterable[RowCopy]) -> list[BlockRun]:
    """Merge rows into as few copies as possible."""
    runs: list[BlockRun] = []
    for source, target in sorted(copies):
        if runs and (source, target) == (runs[-1].source_rows.stop, runs[-1].target_rows.stop):
            runs[-1] = runs[-1]._replace(num_blocks=runs[-1].num_blocks + 1)
        else:
            runs.append(BlockRun(source, target, 1))
    return runs
