"""The places of ranks in the grid of stages and shards, and the memory and sockets that each inherits.

Owns: who shares what. Shards of a stage sum over a page of their own; all ranks agree over another; each rank
sends its hidden states to the one with the same shard in the next stage.
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
    """One rank in the grid. `page` is that of its stage, `world` that of all ranks; file descriptors."""

    stage: int
    shard: int
    num_stages: int
    num_shards: int
    page: int
    world: int
    inlet: PipeEnd | None
    """Way from the stage before; None in the first."""
    outlet: PipeEnd | None
    """Way to the next stage; None in the last."""

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
        return (self.page, self.world, *(each for end in ends for each in (end.page, end.socket)))


def make_places(num_stages: int, num_shards: int) -> list[RankPlace]:
    """Allocate everything for all ranks, in the order of ranks. Raises OSError."""
    world = make_page()
    pages = [make_page() for _ in range(num_stages)]
    ways = [[_make_way() for _ in range(num_shards)] for _ in range(num_stages - 1)]
    return [
        RankPlace(
            stage=stage,
            shard=shard,
            num_stages=num_stages,
            num_shards=num_shards,
            page=pages[stage],
            world=world,
            inlet=ways[stage - 1][shard][1] if stage else None,
            outlet=ways[stage][shard][0] if stage < num_stages - 1 else None,
        )
        for stage in range(num_stages)
        for shard in range(num_shards)
    ]


def _make_way() -> tuple[PipeEnd, PipeEnd]:
    page, (one, other) = make_page(), socket.socketpair()
    return PipeEnd(page, one.detach()), PipeEnd(page, other.detach())
