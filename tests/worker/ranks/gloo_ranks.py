"""Ranks that exchange everything by torch.distributed with gloo: slow, and not ours. What ours must equal.

Owns: the process group, over a file and the loopback device.
"""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from worker.ranks.gathering_ranks import GatheringRanks
from worker.ranks.linked_ranks import CalledReducer
from worker.ranks.ranks import ExchangeTimes, Reducer
from worker.ranks.stage import ONLY_STAGE

_TIMEOUT = timedelta(seconds=60)


class GlooRanks(GatheringRanks):
    """See Ranks."""

    def __init__(self, store: Path, *, rank: int, size: int) -> None:
        self.rank, self.size, self.stage = rank, size, ONLY_STAGE
        self._world = self
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Not the process's own group, which is that of ranks on GPUs.
        self._group = dist.ProcessGroupGloo(dist.FileStore(str(store), size), rank, size, _TIMEOUT)
        self._called = CalledReducer(self.reduce)

    def join(self, library: Path | None) -> None:
        """See Ranks."""

    @property
    def reducer(self) -> Reducer:
        return self._called.reducer

    def times(self) -> ExchangeTimes:
        """Return none."""
        return ExchangeTimes()

    def reduce(self, sums: Tensor) -> None:
        """See Ranks."""
        if sums.numel():
            self._group.allreduce([sums]).wait()

    def _gather(self, own: Tensor, whole: Tensor) -> None:
        parts = [torch.empty_like(own) for _ in range(self.size)]
        if own.numel():
            self._group.allgather([parts], [own]).wait()
        torch.cat(parts, dim=1, out=whole.view(len(own), self.size * own.shape[1]))
