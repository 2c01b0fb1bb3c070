"""Tokens that a running sequence would lose with its blocks: what the cost of a preemption is made of."""

from functools import partial

from scheduler.blocks.pool import BlockPool
from scheduler.blocks.prefix_index import PrefixIndex
from scheduler.group_places import GroupPlaces
from scheduler.longest_hit import longest_hit
from scheduler.sequence import Sequence


class Stakes:
    """Judges sequences that hold blocks."""

    def __init__(
        self, index: PrefixIndex, pool: BlockPool, groups: tuple[GroupPlaces, ...], block_size: int
    ) -> None:
        self._index = index
        self._pool = pool
        self._groups = groups
        self._block_size = block_size
        self._has_state = any(group.is_fixed for group in groups)

    def num_tokens_at_stake(self, seq: Sequence) -> int:
        """Computed tokens that are computed again if the sequence gives up its blocks.

        What another sequence holds will be found again. A state is only found at points that were kept; what
        lies before these is taken to be there still.
        """
        tests = [partial(self._comes_back, index, seq) for index in range(len(self._groups))]
        num_places = -(-seq.num_computed_tokens // self._block_size)
        end, _ = longest_hit(self._groups, tests, num_places, self._block_size)
        return max(seq.num_computed_tokens - end * self._block_size, 0)

    def num_tokens_lost(self, seq: Sequence, num_from_free: int) -> float:
        """Count the computed tokens that a sequence loses to one which takes `num_from_free` free blocks.

        Its tail is reused first; the prefix cache keeps the rest for a while.
        """
        num_lost, num_held = self.num_tokens_at_stake(seq), sum(1 for _ in seq.held_blocks())
        if self._has_state or not num_held or not (self._index.is_on and seq.reads_prefix_cache):
            return num_lost
        part = min(max(num_from_free - self._pool.num_free, 0) / num_held, 1.0)
        return min(num_lost, part * num_lost + seq.num_computed_tokens % self._block_size)

    def _comes_back(self, index: int, seq: Sequence, place: int) -> bool:
        """Whether a place will be found again once the sequence has given it up."""
        if self._groups[index].is_fixed:
            return bool(self._index.found_at(index, seq, place))
        if self._has_state:
            return True
        if place < seq.tables[index].first:
            return bool(self._index.found_at(index, seq, place))
        row = seq.tables[index].row(place, self._groups[index].num_stripes)
        return bool(row) and self._pool.num_references(row[0]) > 1
