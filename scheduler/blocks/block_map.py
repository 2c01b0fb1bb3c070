"""The use of every block at one moment, as runs of equal neighbours.

Owns: that summary, for viewers.
Never: changes a block.
"""

from collections.abc import Iterable
from enum import IntEnum
from itertools import groupby, islice

from scheduler.blocks.kv_cache_manager import KVCacheManager
from scheduler.sequence import Sequence


class BlockUse(IntEnum):
    """The use of a block."""

    FREE = 0
    CACHED = 1  # free, and its content may still be found
    OWNED = 2  # by one sequence
    SHARED = 3  # by several; the first of them in the running queue stands for all


def block_runs(
    kv: KVCacheManager, running: Iterable[Sequence], *, max_runs: int
) -> list[tuple[int, int, int]]:
    """Return runs of (number of blocks, BlockUse, sequence id or 0), from the first block on.

    O(blocks). Runs beyond `max_runs` are left out: all blocks after the last run are unknown.
    """
    uses: list[tuple[int, int]] = [(BlockUse.FREE, 0)] * (kv.num_blocks + 1)
    for block in kv.prefix_cache.published():
        uses[block] = (BlockUse.CACHED, 0)
    for seq in running:
        owned, shared = (BlockUse.OWNED, seq.sequence_id), (BlockUse.SHARED, seq.sequence_id)
        for block in seq.block_ids[seq.num_passed_blocks :]:
            if uses[block][0] < BlockUse.OWNED:
                uses[block] = owned if kv.pool.num_references(block) == 1 else shared
    groups = groupby(islice(uses, 1, None))
    return [(sum(1 for _ in group), int(use), owner) for (use, owner), group in islice(groups, max_runs)]
