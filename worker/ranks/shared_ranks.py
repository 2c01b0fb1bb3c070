"""Ranks on one machine, over memory that their processes share.

Owns: the mapping of the memory, and the C functions that exchange over it.
Never: gives up waiting for a rank (csrc/ranks.h); the engine process sees one end, and ends all.

Shapes: T tokens, P numbers of one rank.
"""

import ctypes
import mmap
from ctypes import POINTER, c_double, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from worker.ranks.gathering_ranks import GatheringRanks
from worker.ranks.linked_ranks import LinkedRanks, Peers
from worker.ranks.places import PAGE_BYTES, RankPlace
from worker.ranks.ranks import ExchangeTimes, Reducer, World
from worker.ranks.stage import (
    ONLY_STAGE,
    HiddenReceiver,
    HiddenSender,
    SharedReceiver,
    SharedSender,
    Stage,
)


class SharedRanks(GatheringRanks):
    """Ranks over memory that their processes share. Not for several threads at once."""

    def __init__(
        self,
        page: int,
        *,
        rank: int,
        size: int,
        stage: Stage = ONLY_STAGE,
        world: World | None = None,
    ) -> None:
        """Map the memory behind a file descriptor, which may be closed afterwards.

        `world` are the ranks of all stages, where there are several.
        """
        self.rank, self.size, self.stage = rank, size, stage
        self._world: World = world or self
        self._page = mmap.mmap(page, PAGE_BYTES)
        self._library: Any = None
        self._ranks: int | None = None

    def join(self, library: Path | None) -> None:
        """See Ranks. Later calls do nothing: turns are counted from the first."""
        assert library is not None
        if self._ranks is not None:
            return
        if self._world is not self:
            self._world.join(library)
        functions: Any = ctypes.CDLL(str(library))
        functions.tokenyard_ranks_open.argtypes = (c_void_p, c_int64, c_int, c_int)
        functions.tokenyard_ranks_open.restype = c_void_p
        functions.tokenyard_ranks_reduce.argtypes = (c_void_p, c_void_p, c_int64)
        functions.tokenyard_ranks_reduce.restype = None
        functions.tokenyard_ranks_gather.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p)
        functions.tokenyard_ranks_gather.restype = None
        functions.tokenyard_ranks_times.argtypes = (c_void_p, POINTER(c_double))
        functions.tokenyard_ranks_times.restype = None
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        self._library = functions
        self._ranks = functions.tokenyard_ranks_open(address, PAGE_BYTES, self.rank, self.size)
        if self._ranks is None:
            raise MemoryError("no memory for the ranks")

    @property
    def reducer(self) -> Reducer:
        function = ctypes.cast(self._library.tokenyard_ranks_reduce, c_void_p).value
        assert function is not None
        return Reducer(function, self._ranks)

    def reduce(self, sums: Tensor) -> None:
        assert sums.dtype is torch.float32
        assert sums.is_contiguous()
        self._library.tokenyard_ranks_reduce(self._ranks, sums.data_ptr(), sums.numel())

    def times(self) -> ExchangeTimes:
        if self._ranks is None:
            return ExchangeTimes()
        seconds = (c_double * 2)()
        self._library.tokenyard_ranks_times(self._ranks, seconds)
        return ExchangeTimes(exchange_s=seconds[0] - seconds[1], wait_s=seconds[1])

    def _gather(self, own: Tensor, whole: Tensor) -> None:
        """Exchange rows; those of all ranks come to `whole`."""
        row_bytes = own.shape[1] * own.element_size()
        self._library.tokenyard_ranks_gather(
            self._ranks, own.data_ptr(), len(own), row_bytes, whole.data_ptr()
        )


class NodeLinks(Protocol):
    """Links of a rank to other nodes, in the place of shared memory."""

    def world(self) -> World: ...

    def peers(self) -> Peers: ...

    def inlet(self) -> HiddenReceiver: ...

    def outlet(self) -> HiddenSender: ...

    def store(self) -> Store: ...

    def interface(self) -> str: ...


def open_ranks(place: RankPlace, links: NodeLinks | None = None) -> SharedRanks | LinkedRanks:
    """Open what a process has inherited for its place, and `links` for what it has not."""
    world = _world_of(place, links)
    here = SharedRanks(
        place.page,
        rank=place.shard % place.num_here,
        size=place.num_here,
        stage=stage_of(place, links),
        world=world,
    )
    if links is None or world is None or not place.needs_peers:
        return here
    return LinkedRanks(here, links.peers(), world, rank=place.shard, size=place.num_shards)


def stage_of(place: RankPlace, links: NodeLinks | None) -> Stage:
    """Open the ways of hidden states through the host."""
    inlet, outlet = _inlet_of(place, links), _outlet_of(place, links)
    return Stage(place.stage, place.num_stages, inlet=inlet, outlet=outlet)


def _inlet_of(place: RankPlace, links: NodeLinks | None) -> HiddenReceiver | None:
    if place.inlet is not None:
        return SharedReceiver(place.inlet)
    return links.inlet() if links is not None and place.needs_inlet else None


def _outlet_of(place: RankPlace, links: NodeLinks | None) -> HiddenSender | None:
    if place.outlet is not None:
        return SharedSender(place.outlet)
    return links.outlet() if links is not None and place.needs_outlet else None


def _world_of(place: RankPlace, links: NodeLinks | None) -> World | None:
    if place.world is None:
        assert links is not None, "ranks of other nodes are reached over links"
        return links.world()
    size = place.num_stages * place.num_shards
    return SharedRanks(place.world, rank=place.rank, size=size) if place.num_stages > 1 else None
