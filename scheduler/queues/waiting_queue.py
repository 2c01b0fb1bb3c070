"""Waiting queue, best rank first: new sequences and preempted ones.

Owns: a heap with tombstones, so that an abort anywhere in a queue of any length costs O(1), and adding
and taking the first O(log n).
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from scheduler.policy import Rank
from scheduler.sequence import Sequence, Status

_COMPACT_ABOVE = 64


class WaitingQueue:
    """Heap of sequences. One that has ended counts as removed; its entry is dropped when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in no particular order; for tests and reports."""
        return (seq for _, seq in self._heap if seq.status is not Status.FINISHED)

    def push(self, seq: Sequence) -> None:
        heappush(self._heap, (seq.rank, seq))
        self._num_waiting += 1

    def peek(self) -> Sequence:
        """First in the queue. The caller makes sure that there is one."""
        while self._heap[0][1].status is Status.FINISHED:
            heappop(self._heap)
        return self._heap[0][1]

    def take(self, seq: Sequence) -> None:
        """Remove a sequence near the front: O(place * log(waiting))."""
        passed: list[tuple[Rank, Sequence]] = []
        while (entry := heappop(self._heap))[1] is not seq:
            passed.append(entry)
        for entry in passed:
            heappush(self._heap, entry)
        self._num_waiting -= 1

    def after_first(self, num: int) -> list[Sequence]:
        """At most `num` sequences behind the first one, in order. O(num * log(waiting))."""
        entries: list[tuple[Rank, Sequence]] = []
        while self._heap and len(entries) <= num:
            entry = heappop(self._heap)
            if entry[1].status is not Status.FINISHED:
                entries.append(entry)
        for entry in entries:
            heappush(self._heap, entry)
        return [seq for _, seq in entries[1:]]

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence that ended while it waited."""
        assert seq.status is Status.FINISHED
        self._num_waiting -= 1
        if len(self._heap) > _COMPACT_ABOVE and len(self._heap) > 2 * self._num_waiting:
            self._heap = [entry for entry in self._heap if entry[1].status is not Status.FINISHED]
            heapify(self._heap)
