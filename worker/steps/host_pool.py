"""The host's pool of KV blocks, for preempted sequences and cached prefixes; all copies of a plan.

Owns: its memory, in the device pool's format; the check of a plan's copies; the measured time of a copy.

Block ids are 1 to num_blocks, as in the device's pool; but nothing here is padding, so block n is row n - 1.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from scheduler.messages import BlockCopy, BlockId
from worker.attention.interface import AttentionMetadata
from worker.attention.kv_cache import KVCache
from worker.devices.block_copies import Pools, RowCopy, TouchedRows
from worker.devices.device import Device
from worker.memory_sizes import num_host_blocks
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

_MEASURED_BLOCKS = 64
_MEASURED_ROUNDS = 3
_MEASURED_MOST_S = 0.05
# Both pools are mapped lazily: copying to measure takes memory before it is needed.
_MEASURED_MOST_BYTES = 32 << 20


CopyRows = Callable[[Tensor, Tensor, Tensor], None]
"""Copies rows of a pool [N, E]: P sources to P targets. Targets differ, and none is a source."""


class HostPool:
    """Host pool of one worker. Without swap space it has no blocks, and refuses every swap."""

    def __init__(self, swap_bytes: int, cache: KVCache, device: Device) -> None:
        """Allocate. Raises StartupError, with numbers, for a swap space that is too large or too small."""
        layout = cache.layout
        self.num_blocks = num_host_blocks(swap_bytes=swap_bytes, block_bytes=layout.block_bytes)
        self.block_bytes = layout.block_bytes
        self._num_device_blocks = cache.num_blocks
        self._device = device
        memory = torch.empty(0, dtype=layout.storage)
        if self.num_blocks:
            device.check_swap_space(
                swap_bytes=self.num_blocks * layout.block_bytes, cache_bytes=cache.num_bytes
            )
            try:
                memory = device.host_zeros(self.num_blocks * layout.block_numel, layout.storage)
            except (MemoryError, OSError, RuntimeError) as error:
                raise StartupError(
                    f"the system refuses {self.num_blocks * layout.block_bytes} bytes of swap space",
                    fix="ask for less with --swap-space",
                ) from error
        self._memory = memory  # itself, not only views of it: a device may pin it while this tensor lives
        self._pool_NE = cache.pool_NE
        self._block_size = layout.block_size
        host_ME = memory.view(self.num_blocks, layout.block_numel)
        self._copier = device.open_copier(Pools(device_NE=cache.pool_NE, host_ME=host_ME))
        self._filled: set[BlockId] = set()
        self._copy_rows: CopyRows = _copy_rows

    def swap(
        self, out: Sequence[BlockCopy], back: Sequence[BlockCopy], within: Sequence[BlockCopy] = ()
    ) -> dict[BlockId, str]:
        """Carry out a plan's copies: all of `out` before any of `back`, and all of these before `within`.

        A device that works ahead makes them later, during its steps: see `step`.

        Returns the device blocks whose content did not arrive, with the reason: a sequence with one of them
        in its table must fail. A copy is left out if it names a block outside of the pools, or a host block
        that was never filled.
        """
        lost = self._swap(out, back) if out or back else {}
        if within:
            self._copy_within(within, lost)
        return lost

    def _swap(self, out: Sequence[BlockCopy], back: Sequence[BlockCopy]) -> dict[BlockId, str]:
        leaving = [copy for copy in out if self._can_leave(copy)]
        # Forgotten first: if the copies raise half-way, no sequence reads what an earlier owner left there.
        self._filled.difference_update(copy.target for copy in out)
        arrived = {copy.target for copy in leaving}
        lost = {
            copy.target: reason for copy in back if (reason := self._why_not_back(copy, arrived)) is not None
        }
        returning = [copy for copy in back if copy.target not in lost]
        self._copier.swap(
            [RowCopy(copy.source, copy.target - 1) for copy in leaving],
            [RowCopy(copy.source - 1, copy.target) for copy in returning],
        )
        # Perhaps not there yet; but later reads wait for it.
        self._filled |= arrived
        return lost

    def step(self, metadata: AttentionMetadata) -> AbstractContextManager[None]:
        """Enter while a step is computed: it sees the copies asked before as done."""
        if not self.num_blocks:
            return nullcontext()
        read_blocks_R = -(-metadata.seq_lens // self._block_size)
        tables = [metadata.tables.gathered(stripe) for stripe in range(metadata.tables.num_stripes)]
        if not tables:  # states alone
            tables = [np.empty((len(metadata.seq_lens), 0), np.int32)]
        tables_RB = tables[0] if len(tables) == 1 else np.concatenate(tables)
        read_blocks_R = np.tile(read_blocks_R, len(tables))
        states_RS, written_W = metadata.state_blocks, metadata.token_blocks_ST.reshape(-1)
        if states_RS.size:  # of which a step writes all that it reads
            states_RS = np.tile(states_RS, (len(tables), 1))
            tables_RB = np.concatenate([states_RS, tables_RB], axis=1)
            read_blocks_R = read_blocks_R + states_RS.shape[1]
            tapped = [block for tap in metadata.taps for block in tap.blocks_S]
            written_W = np.concatenate([written_W, states_RS.reshape(-1), np.array(tapped, np.int64)])
        return self._among_copies(TouchedRows(written_W, tables_RB, read_blocks_R))

    def _among_copies(self, touched: TouchedRows) -> AbstractContextManager[None]:
        return self._copier.step(touched) if self.num_blocks else nullcontext()

    def _copy_within(self, copies: Sequence[BlockCopy], lost: dict[BlockId, str]) -> None:
        """Copy in the order of the device's work; all sources are read before any target is written."""
        known = range(1, self._num_device_blocks + 1)
        sound = []
        for copy in copies:
            if copy.source in lost:
                lost[copy.target] = lost[copy.source]
            elif copy.source not in known or copy.target not in known:
                lost[copy.target] = f"copied from block {copy.source}, outside of 1 to {known.stop - 1}"
            else:
                sound.append(copy)
        if sound:
            # One row of sources and one of targets, each without gaps.
            sources_P, targets_P = np.ascontiguousarray(np.array(sound).T)
            touched = TouchedRows(targets_P, sources_P[None], np.array([len(sources_P)]))
            with self._among_copies(touched):
                sources, targets = self._device.tensor(np.stack([sources_P, targets_P]))
                self._copy_rows(self._pool_NE, sources, targets)

    def copy_with(self, copy_rows: CopyRows) -> None:
        """Let a kernel make the copies within the device's pool from now on.

        The kernel takes a source of -1 for none: this call compiles it now, not in the middle of service.
        """
        self._copy_rows = copy_rows
        source, target = self._device.tensor(np.array([[-1], [0]]))
        copy_rows(self._pool_NE, source, target)

    def measure_copy_s(self) -> float:
        """Measure the seconds to copy one block, one way; 0 without blocks. Call before the first swap."""
        if not self.num_blocks:
            return 0.0
        affordable = max(1, _MEASURED_MOST_BYTES // self.block_bytes)
        num_blocks = min(self.num_blocks, self._num_device_blocks, affordable, _MEASURED_BLOCKS)
        ids = [BlockId(block_id) for block_id in range(1, num_blocks + 1)]
        # One range descends while the other ascends: after hours of service few blocks are neighbours.
        out = [BlockCopy(*pair) for pair in zip(ids, reversed(ids), strict=True)]
        back = [BlockCopy(copy.target, copy.source) for copy in out]
        self._device.wait()
        # One round untimed: it takes the pages from the system.
        self._time_round(out, back)
        seconds = [self._time_round(out, back)]
        while len(seconds) < _MEASURED_ROUNDS and sum(seconds) < _MEASURED_MOST_S:
            seconds.append(self._time_round(out, back))
        self._filled.clear()
        return statistics.median(seconds) / (2 * num_blocks)

    def _time_round(self, out: Sequence[BlockCopy], back: Sequence[BlockCopy]) -> float:
        started_s = time.perf_counter()
        self.swap(out, [])
        self.swap([], back)
        self._device.wait()
        return time.perf_counter() - started_s

    def _can_leave(self, copy: BlockCopy) -> bool:
        if 1 <= copy.source <= self._num_device_blocks and 1 <= copy.target <= self.num_blocks:
            return True
        # No sequence of this plan needs it: the sequence fails when it is swapped in.
        log.error(
            "%s not swapped out: the pools have %d and %d", copy, self._num_device_blocks, self.num_blocks
        )
        return False

    def _why_not_back(self, copy: BlockCopy, arrived: set[BlockId]) -> str | None:
        if not 1 <= copy.target <= self._num_device_blocks:
            return f"a block outside of 1 to {self._num_device_blocks}"
        if not 1 <= copy.source <= self.num_blocks:
            return f"swapped in from a host block outside of 1 to {self.num_blocks}"
        if copy.source not in self._filled and copy.source not in arrived:
            return f"swapped in from host block {copy.source}, where nothing was swapped out to"
        return None


def _copy_rows(pool_NE: Tensor, sources_P: Tensor, targets_P: Tensor) -> None:
    pool_NE.index_copy_(0, targets_P, pool_NE.index_select(0, sources_P))
