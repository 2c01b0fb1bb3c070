"""The use of the blocks at one moment: of each as runs of equal neighbours, and by groups of layers."""

from collections.abc import Iterable
from enum import IntEnum
from itertools import groupby, islice

from scheduler.blocks.kv_cache_manager import KVCacheManager
from scheduler.cache_groups import CacheGroup
from scheduler.counters import GroupUse
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

    O(blocks), some 50 ns for each. Runs beyond `max_runs` are left out: all blocks after the last run are
    unknown.
    """
    codes = [0] * (kv.pool.num_blocks + 1)  # as _decoded reads them
    for block in kv.index.findable_blocks():
        codes[block] = 1
    for seq in running:
        owned = 2 * seq.sequence_id + 2
        for block in seq.held_blocks():
            code = codes[block]
            codes[block] = owned if code <= 1 else code | 1
    runs = islice(groupby(islice(codes, 1, None)), max_runs)
    return [(len(list(run)), *_decoded(code)) for code, run in runs]


def group_uses(
    kv: KVCacheManager, groups: tuple[CacheGroup, ...], running: Iterable[Sequence]
) -> list[GroupUse]:
    """Count the blocks of each group, between two plans. O(places that windows reach), else O(sequences)."""
    running, held = list(running), [0] * len(groups)
    for index, group in enumerate(groups):
        if index != kv.index.main_group:
            rows = {block for seq in running for block in seq.tables[index].block_ids[:: group.num_stripes]}
            held[index] = len(rows) * group.num_stripes
    held[kv.index.main_group] = kv.pool.num_used - sum(held)
    return [
        GroupUse(group.name, num_held, kv.index.num_findable(index))
        for index, (group, num_held) in enumerate(zip(groups, held, strict=True))
    ]


def _decoded(code: int) -> tuple[int, int]:
    """Use and owner: 0 free, 1 cached; twice the sequence's id plus 2, plus 1 if others share it."""
    if code <= 1:
        return code, 0
    return BlockUse.SHARED.value if code & 1 else BlockUse.OWNED.value, (code >> 1) - 1
