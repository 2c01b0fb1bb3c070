"""Index of the waiting sequences by the blocks that they need.

Owns: groups of like need, each in order of rank. So a sequence that fits is found behind any number of larger
ones.
Never: knows what the prefix cache holds: with a hit a sequence needs less than it is filed under.
"""

from scheduler.messages import SequenceId
from scheduler.queues.lazy_heap import LazyHeap
from scheduler.sequence import Sequence

# Looked at in each group. More than one: another thing than blocks may keep the first out of the step, and in
# the last group only some fit.
_CANDIDATES = 4


class NeedIndex:
    """A group holds needs of one binary order of magnitude."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._groups: dict[int, LazyHeap] = {}
        self._magnitudes: dict[SequenceId, int] = {}  # when they were added: tokens may still come meanwhile

    def push(self, seq: Sequence) -> None:
        magnitude = (seq.num_tokens // self._block_size + 1).bit_length()
        self._magnitudes[seq.sequence_id] = magnitude
        if magnitude not in self._groups:
            self._groups[magnitude] = LazyHeap()
        self._groups[magnitude].push(seq.rank, seq)

    def remove(self, seq: Sequence) -> None:
        """Note that a sequence waits no more."""
        self._groups[self._magnitudes.pop(seq.sequence_id)].note_removal()

    def candidates(self, num_free: int) -> list[Sequence]:
        """Best few sequences of each group of which some may fit into `num_free` blocks, in order of rank."""
        found: list[Sequence] = []
        for magnitude, group in self._groups.items():
            if 1 << max(magnitude - 1, 0) <= num_free:
                found += group.first(_CANDIDATES)
        return sorted(found, key=lambda seq: seq.rank)
