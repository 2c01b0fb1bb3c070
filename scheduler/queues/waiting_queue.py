"""Waiting queue, best rank first: new sequences and preempted ones; and the same by the blocks they need."""

from collections.abc import Iterator

from scheduler.group_places import GroupPlaces, most_blocks
from scheduler.messages import SequenceId
from scheduler.queues.lazy_heap import Entry, LazyHeap
from scheduler.sequence import Sequence

# Looked at in each group of needs. More than one: another thing than blocks may keep the first out of the
# step, and in the last group only some fit.
_CANDIDATES = 4


class WaitingQueue:
    """An abort anywhere in a queue of any length is as cheap as adding and taking the first."""

    def __init__(self) -> None:
        self._heap = LazyHeap()

    def __len__(self) -> int:
        return self._heap.num_live  # asked several times in each step

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in no particular order; for tests and reports."""
        return iter(self._heap)

    def heaps(self) -> tuple[list[Entry], ...]:
        """Entries, as heaps that `walk` reads."""
        return self._heap.heaps()

    def push(self, seq: Sequence) -> None:
        self._heap.push(seq.rank, seq)

    def peek(self) -> Sequence:
        """First in the queue. The caller makes sure that there is one."""
        first = self._heap.peek()
        assert first is not None, "the queue is empty"
        return first

    def oldest(self) -> Sequence:
        """Sequence with the best rank: the first."""
        return self.peek()

    def choices(self) -> list[Sequence]:
        """First of each level of priority; without levels, the first of all. There must be one."""
        return [self.peek()]

    def most_urgent(self) -> Sequence:
        """First in the queue: the rank says all there is to urgency."""
        return self.peek()

    def after_first(self, num: int) -> list[Sequence]:
        """List the sequences behind the first one in order, at most `num`. O(num * log(waiting))."""
        return self._heap.first(num + 1)[1:]

    def remove(self, seq: Sequence) -> None:  # noqa: ARG002 - FairWaitingQueue needs it
        """Remove a sequence whose turn to wait has ended."""
        self._heap.note_removal()


class AgingWaitingQueue(WaitingQueue):
    """Waiting queue in which an older sequence may stand before a more urgent one."""

    def __init__(self) -> None:
        super().__init__()
        self._by_urgency = LazyHeap()

    def push(self, seq: Sequence) -> None:
        super().push(seq)
        self._by_urgency.push(seq.running_rank, seq)

    def most_urgent(self) -> Sequence:
        """First sequence, whatever the age of others. There must be one."""
        first = self._by_urgency.peek()
        assert first is not None, "the queue is empty"
        return first

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        self._by_urgency.note_removal()


class NeedIndex:
    """Waiting sequences by the blocks that they need, as far as the prefix cache does not give them.

    A group holds needs of one binary order of magnitude, in order of rank. So a sequence that fits is found
    behind any number of larger ones.
    """

    def __init__(self, groups: tuple[GroupPlaces, ...]) -> None:
        self._places = groups
        self._groups: dict[int, LazyHeap] = {}
        self._magnitudes: dict[SequenceId, int] = {}  # when they were added: tokens may still come meanwhile

    def push(self, seq: Sequence) -> None:
        magnitude = most_blocks(self._places, seq.num_tokens + 1).bit_length()
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
