"""Heap of waiting sequences from which any of them can be removed at once.

Owns: the entries, dead ones too, and when those are dropped: when they surface, and a few with each call once
there are more of them than living ones. So no single call pays for a mass of aborts.
Never: decides that a sequence waits; `Sequence.turn` says so, and changes whenever one begins or ceases to.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from scheduler.policy import Rank
from scheduler.sequence import Sequence

Entry = tuple[Rank, int, Sequence]

_SWEEP_ABOVE = 64
_SWEPT_AT_ONCE = 4


class LazyHeap:
    """Sequences by a key that is fixed while they wait. Adding costs O(log n), removing O(log n) at worst."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._unswept: list[Entry] = []
        """A heap too: entries are taken from its end, and the living ones of them go to the other."""
        self.num_live = 0

    def __len__(self) -> int:
        return self.num_live

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in no particular order."""
        for entries in (self._heap, self._unswept):
            yield from (seq for _, turn, seq in entries if turn == seq.turn)

    def push(self, key: Rank, seq: Sequence) -> None:
        """Add a sequence whose turn to wait has begun."""
        heappush(self._heap, (key, seq.turn, seq))
        self.num_live += 1

    def note_removal(self) -> None:
        """Note that one of these sequences has ceased to wait."""
        self.num_live -= 1
        self._sweep()

    def peek(self) -> Sequence | None:
        """First sequence; None if there is none."""
        heap = self._best()
        return heap[0][2] if heap else None

    def first(self, num: int) -> list[Sequence]:
        """List the first sequences in order, at most `num`. O(num * log n)."""
        entries: list[Entry] = []
        while len(entries) < num and (heap := self._best()):
            entries.append(heappop(heap))
        for entry in entries:
            heappush(self._heap, entry)
        return [seq for _, _, seq in entries]

    def heaps(self) -> tuple[list[Entry], ...]:
        """Entries, as heaps that `walk` reads."""
        return self._heap, self._unswept

    def _best(self) -> list[Entry]:
        """Heap whose first entry lives and is the best of both; an empty one if there is none."""
        heap = _with_living_first(self._heap)
        if not self._unswept:
            return heap
        unswept = _with_living_first(self._unswept)
        return unswept if unswept and (not heap or unswept[0] < heap[0]) else heap

    def _sweep(self) -> None:
        if self._unswept:
            for _ in range(min(_SWEPT_AT_ONCE, len(self._unswept))):
                entry = self._unswept.pop()
                if entry[1] == entry[2].turn:
                    heappush(self._heap, entry)
        elif len(self._heap) > 2 * self.num_live + _SWEEP_ABOVE:
            self._heap, self._unswept = [], self._heap


def walk(heaps: Iterable[list[Entry]]) -> Iterator[Sequence | None]:
    """Iterate over the entries of several heaps in order, and change none: the first k cost O(k log k).

    None stands for a dead entry.
    """
    frontier = [(heap[0][0], number, 0, heap) for number, heap in enumerate(heaps) if heap]
    heapify(frontier)
    while frontier:
        _, number, place, heap = heappop(frontier)
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(heap):
                heappush(frontier, (heap[child][0], number, child, heap))
        _, turn, seq = heap[place]
        yield seq if turn == seq.turn else None


def _with_living_first(heap: list[Entry]) -> list[Entry]:
    while heap and heap[0][1] != heap[0][2].turn:
        heappop(heap)
    return heap
