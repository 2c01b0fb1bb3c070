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

    O(blocks), some 50 ns for each. Runs beyond `max_runs` are left out: all blocks after the last run are
    unknown.
    """
    codes = [0] * (kv.num_blocks + 1)  # as _decoded reads them
    for block in kv.findable_blocks():
        codes[block] = 1
    for seq in running:
        owned = 2 * seq.sequence_id + 2
        for block in seq.held_blocks():
            code = codes[block]
            codes[block] = owned if code <= 1 else code | 1
    runs = islice(groupby(islice(codes, 1, None)), max_runs)
    return [(len(list(run)), *_decoded(code)) for code, run in runs]


def _decoded(code: int) -> tuple[int, int]:
    """Use and owner: 0 free, 1 cached; twice the sequence's id plus 2, plus 1 if others share it."""
    if code <= 1:
        return code, 0
    return BlockUse.SHARED.value if code & 1 else BlockUse.OWNED.value, (code >> 1) - 1
