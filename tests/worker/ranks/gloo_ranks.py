"""Ranks that exchange everything by torch.distributed with gloo: slow, and not ours. What ours must equal.

Owns: the process group, over a file and the loopback device.
"""

import ctypes
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from worker.ranks.ranks import Reducer
from worker.ranks.shared_ranks import SharedRanks
from worker.ranks.stage import ONLY_STAGE

_TIMEOUT = timedelta(seconds=60)
_Reduce = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class GlooRanks(SharedRanks):
    """See Ranks. Of its base it keeps what is made of gathered parts."""

    def __init__(self, store: Path, *, rank: int, size: int) -> None:
        self.rank, self.size, self.stage = rank, size, ONLY_STAGE
        self._world = self
        self._ranks = None
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Not the process's own group, which is that of ranks on GPUs.
        self._group = dist.ProcessGroupGloo(dist.FileStore(str(store), size), rank, size, _TIMEOUT)
        self._function = _Reduce(self._reduce_at)

    def join(self, library: Path | None) -> None:
        """See Ranks."""

    @property
    def reducer(self) -> Reducer:
        function = ctypes.cast(self._function, ctypes.c_void_p).value
        assert function is not None
        return Reducer(function, None)

    def reduce(self, sums: Tensor) -> None:
        """See Ranks."""
        if sums.numel():
            self._group.allreduce([sums]).wait()

    def _reduce_at(self, _context: int | None, address: int, count: int) -> None:
        numbers = (ctypes.c_float * count).from_address(address)
        self.reduce(torch.frombuffer(numbers, dtype=torch.float32))

    def _gather(self, own: Tensor, whole: Tensor) -> None:
        parts = [torch.empty_like(own) for _ in range(self.size)]
        if own.numel():
            self._group.allgather([parts], [own]).wait()
        torch.cat(parts, dim=1, out=whole.view(len(own), self.size * own.shape[1]))
