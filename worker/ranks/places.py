"""The places of ranks in the grid of stages and shards, and the memory and sockets that each inherits.

Owns: which ranks share a memory, and that memory, which has no name: processes inherit it, and it ends with
the last of them. Shards of a stage sum over a page of their own; all ranks agree over another. Each rank
sends its hidden states to the one with the same shard in the next stage. Where ranks are on several nodes, a
node has whole stages or a part of one, and parts on different nodes exchange over links (engine/nodes).
Never: needs torch, so that the ranks can be started before anything slow is imported.
"""

import os
import socket

import msgspec

PAGE_BYTES = 16 << 20
"""For the parts of all ranks, two of each; larger ones are exchanged in pieces."""


class PipeEnd(msgspec.Struct, frozen=True):
    """One end of a way for hidden states; file descriptors."""

    page: int
    socket: int


class RankPlace(msgspec.Struct, frozen=True):
    """One rank in the grid. `page` is that of its stage here, `world` that of all ranks; file descriptors.

    A field of None that the grid has is reached over a link to another node.
    """

    stage: int
    shard: int
    num_stages: int
    num_shards: int
    num_here: int
    """Shards of the stage that are on the same node."""
    page: int
    world: int | None
    inlet: PipeEnd | None
    """Way from the stage before; None in the first."""
    outlet: PipeEnd | None
    """Way to the next stage; None in the last."""

    @property
    def is_linked(self) -> bool:
        """Whether some ranks are on other nodes."""
        return self.world is None

    @property
    def needs_inlet(self) -> bool:
        """Whether hidden states come over a link."""
        return self.inlet is None and self.stage > 0

    @property
    def needs_outlet(self) -> bool:
        """Whether hidden states leave over a link."""
        return self.outlet is None and self.stage < self.num_stages - 1

    @property
    def needs_peers(self) -> bool:
        """Whether the stage is on several nodes."""
        return self.num_here < self.num_shards

    @property
    def peers(self) -> range:
        """Ranks of the stage that exchange over links, this one among them: one of each node."""
        return peers_of(self.rank, num_shards=self.num_shards, num_here=self.num_here)

    @property
    def rank(self) -> int:
        """Number among all; rank 0 is in the engine process."""
        return self.stage * self.num_shards + self.shard

    @property
    def is_reporting(self) -> bool:
        """Whether it has the results of steps."""
        return self.stage == self.num_stages - 1 and self.shard == 0

    @property
    def descriptors(self) -> tuple[int, ...]:
        """List all that a process of this rank must inherit."""
        ends = [end for end in (self.inlet, self.outlet) if end is not None]
        world = () if self.world is None else (self.world,)
        return (self.page, *world, *(each for end in ends for each in (end.page, end.socket)))


def make_places(num_stages: int, num_shards: int, *, node: int = 0, num_nodes: int = 1) -> list[RankPlace]:
    """Allocate everything for the ranks of one node, in the order of ranks. Raises OSError.

    Each node has as many whole stages, or an equal part of one.
    """
    world = make_page() if num_nodes == 1 else None
    num_own = num_stages * num_shards // num_nodes
    own = range(node * num_own, (node + 1) * num_own)
    pages = {stage: make_page() for stage in {rank // num_shards for rank in own}}
    ways = {rank: _make_way() for rank in own if rank + num_shards in own}
    return [
        RankPlace(
            stage=rank // num_shards,
            shard=rank % num_shards,
            num_stages=num_stages,
            num_shards=num_shards,
            num_here=min(num_shards, num_own),
            page=pages[rank // num_shards],
            world=world,
            inlet=ways[rank - num_shards][1] if rank - num_shards in ways else None,
            outlet=ways[rank][0] if rank in ways else None,
        )
        for rank in own
    ]


def peers_of(rank: int, *, num_shards: int, num_here: int) -> range:
    """Return the ranks of a stage that have the same place on each of its nodes as `rank` has on its own."""
    shard = rank % num_shards
    return range(rank - shard + shard % num_here, rank - shard + num_shards, num_here)


def _make_way() -> tuple[PipeEnd, PipeEnd]:
    page, (one, other) = make_page(), socket.socketpair()
    return PipeEnd(page, one.detach()), PipeEnd(page, other.detach())


def make_page() -> int:
    """Allocate the memory; return its file descriptor. Raises OSError."""
    descriptor = os.memfd_create("tokenyard-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, PAGE_BYTES)
    return descriptor
