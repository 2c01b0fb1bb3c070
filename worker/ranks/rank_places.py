"""The places of ranks in the grid of stages and shards, and the memory and sockets that each inherits.

Owns: who shares what. Shards of a stage sum over a page of their own; all ranks agree over another; each rank
sends its hidden states to the one with the same shard in the next stage. Where ranks are on several nodes, a
node has whole stages, and ranks agree and send over links (engine/nodes) in the place of memory.
Never: needs torch, so that the ranks can be started before anything slow is imported.
"""

import socket

import msgspec

from worker.ranks.shared_page import make_page


class PipeEnd(msgspec.Struct, frozen=True):
    """One end of a way for hidden states; file descriptors."""

    page: int
    socket: int


class RankPlace(msgspec.Struct, frozen=True):
    """One rank in the grid. `page` is that of its stage, `world` that of all ranks; file descriptors.

    What is None although the grid has it comes over a link from another node.
    """

    stage: int
    shard: int
    num_stages: int
    num_shards: int
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

    The number of stages is a multiple of the number of nodes.
    """
    world = make_page() if num_nodes == 1 else None
    num_own = num_stages // num_nodes
    own = range(node * num_own, (node + 1) * num_own)
    pages = {stage: make_page() for stage in own}
    ways = {stage: [_make_way() for _ in range(num_shards)] for stage in own[:-1]}
    return [
        RankPlace(
            stage=stage,
            shard=shard,
            num_stages=num_stages,
            num_shards=num_shards,
            page=pages[stage],
            world=world,
            inlet=ways[stage - 1][shard][1] if stage - 1 in ways else None,
            outlet=ways[stage][shard][0] if stage in ways else None,
        )
        for stage in own
        for shard in range(num_shards)
    ]


def _make_way() -> tuple[PipeEnd, PipeEnd]:
    page, (one, other) = make_page(), socket.socketpair()
    return PipeEnd(page, one.detach()), PipeEnd(page, other.detach())
