"""Ranks of one stage on several nodes: over memory within a node, over links between nodes.

Owns: the order of sums, first of a node and then of all nodes, and what each rank sends: its share of the
node's sums, so that a node sends them once; the C function by which kernels ask for sums, and the end of the
process where that exchange fails: a layer cannot be left.
Never: opens a link (engine/nodes), or goes on after an error: any other end would be wrong tokens.

Shapes: N nodes, L ranks on each, T rows, P numbers of one rank, E numbers of a share.
"""

import ctypes
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from worker.ranks.gathering_ranks import GatheringRanks
from worker.ranks.ranks import ExchangeTimes, Ranks, Reducer, World
from worker.ranks.stage import Stage

log = logging.getLogger(__name__)

_Reduce = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class CalledReducer:
    """Lives as long as kernels may call it."""

    def __init__(self, reduce: Callable[[Tensor], None]) -> None:
        """Let `reduce` replace the sums, float32 numbers of any count, by those of all ranks."""
        self._reduce = reduce
        self._function = _Reduce(self._reduce_at)
        function = ctypes.cast(self._function, ctypes.c_void_p).value
        assert function is not None
        self.reducer = Reducer(function, None)

    def _reduce_at(self, _context: int | None, address: int, count: int) -> None:
        try:
            numbers = (ctypes.c_float * count).from_address(address)
            self._reduce(torch.frombuffer(numbers, dtype=torch.float32))
        except BaseException:
            log.critical("a rank cannot exchange sums with the others, and ends", exc_info=True)
            os.abort()


class Peers(Protocol):
    """The ranks with the same place on all nodes of a stage, as one of them sees them."""

    def of_all(self, own: Tensor) -> Tensor:
        """Return the tensors of all, in the order of nodes; each brings one of the same shape."""


class LinkedRanks(GatheringRanks):
    """Ranks of a stage on several nodes. Not for several threads at once."""

    def __init__(self, here: Ranks, peers: Peers, world: World, *, rank: int, size: int) -> None:
        """Join `here`, the ranks of this node, and `peers` to one group."""
        self.rank, self.size = rank, size
        self.stage: Stage = here.stage
        self._here, self._peers, self._world = here, peers, world
        self._called = CalledReducer(self.reduce)
        self._linked_s = 0.0

    def join(self, library: Path | None) -> None:
        self._world.join(library)
        self._here.join(library)

    @property
    def reducer(self) -> Reducer:
        return self._called.reducer

    def reduce(self, sums: Tensor) -> None:
        self._here.reduce(sums)
        flat = sums.view(-1)
        length = -(-len(flat) // self._here.size)
        mine = flat[self._here.rank * length :][:length]
        share_E = flat.new_zeros(length)  # the last one may be shorter
        share_E[: len(mine)] = mine
        first_E, *others = self._exchange(share_E)
        for other_E in others:
            first_E += other_E
        flat.copy_(self._here.gather(first_E[None])[0, : len(flat)])

    def times(self) -> ExchangeTimes:
        """See Ranks. An exchange with other nodes is one of copying and adding, however long it takes."""
        here = self._here.times()
        return here._replace(exchange_s=here.exchange_s + self._linked_s)

    def _gather(self, own: Tensor, whole: Tensor) -> None:
        num_rows, num_own = own.shape
        num_here, num_nodes = self._here.size, self.size // self._here.size
        of_peers_TNP = self._exchange(own).transpose(0, 1)
        whole = whole.view(num_rows, num_nodes, num_here, num_own)
        of_all = self._here.gather(of_peers_TNP.reshape(num_rows, num_nodes * num_own))
        whole.copy_(of_all.view(num_rows, num_here, num_nodes, num_own).transpose(1, 2))

    def _exchange(self, own: Tensor) -> Tensor:
        begin_s = time.monotonic()
        try:
            return self._peers.of_all(own)
        finally:
            self._linked_s += time.monotonic() - begin_s
