"""Deadlines: sequences that have run out of time.

Owns: a heap of the moments at which a time limit of a live sequence runs out, and when entries of sequences
that have ended are dropped: a few with each call, so that no single call pays for all.
Never: a clock; the step's time is an argument. So there is one clock, and one place that decides.
"""

from heapq import heappop, heappush
from math import isinf

from scheduler.messages import TimeLimitKind
from scheduler.sequence import Sequence, Status

_SWEEP_ABOVE = 64
_SWEPT_AT_ONCE = 4


_Entry = tuple[float, int, TimeLimitKind, int]
"""Moment, place among entries of one moment, limit, Sequence.admission."""


class Deadlines:
    """Heap of deadlines: adding costs O(log n), a step without an expiry O(1)."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._unswept: list[_Entry] = []
        """A heap too: entries are taken from its end, and the living ones of them go to the other."""
        # Not in the heap: that keeps its entries until long after most sequences have ended.
        self._live: dict[int, Sequence] = {}
        self._num_living_entries = 0

    def add(self, seq: Sequence) -> None:
        """Note the limits of a sequence, once, when it is added."""
        if isinf(seq.time_limits.nearest_s):
            return
        for limit, seconds in _limits_of(seq):
            if not isinf(seconds):
                # Three entries of one sequence may fall on one moment: the place in the heap decides then.
                place = len(_ORDER) * seq.admission + _ORDER[limit]
                heappush(self._heap, (seq.admitted_s + seconds, place, limit, seq.admission))
                self._live[seq.admission] = seq
                self._num_living_entries += 1

    def forget(self, seq: Sequence) -> None:
        """Drop a sequence that has ended; it need not have a limit."""
        if self._live.pop(seq.admission, None) is not None:
            self._num_living_entries -= sum(not isinf(seconds) for _, seconds in _limits_of(seq))
            self._sweep()

    def expired(self, *, now_s: float) -> list[tuple[Sequence, TimeLimitKind]]:
        """Sequences that have run out of time, each once, in the order of the deadlines."""
        heap, unswept = self._heap, self._unswept
        if (not heap or heap[0][0] > now_s) and (not unswept or unswept[0][0] > now_s):
            return []
        due: list[_Entry] = []
        for entries in (heap, unswept):
            while entries and entries[0][0] <= now_s:
                due.append(heappop(entries))
        found: dict[int, tuple[Sequence, TimeLimitKind]] = {}
        for _, _, limit, admission in sorted(due):
            seq = self._live.get(admission)
            if seq is not None and _still_applies(limit, seq):
                found.setdefault(admission, (seq, limit))
        return list(found.values())

    def _sweep(self) -> None:
        """Drop entries of ended sequences.

        Most end before their deadline, and must not pile up until then.
        """
        if self._unswept:
            for _ in range(min(_SWEPT_AT_ONCE, len(self._unswept))):
                entry = self._unswept.pop()
                if entry[3] in self._live:
                    heappush(self._heap, entry)
        elif len(self._heap) > 2 * self._num_living_entries + _SWEEP_ABOVE:
            self._heap, self._unswept = [], self._heap


_ORDER = {limit: place for place, limit in enumerate(TimeLimitKind)}


def _limits_of(seq: Sequence) -> tuple[tuple[TimeLimitKind, float], ...]:
    limits = seq.time_limits
    return (
        (TimeLimitKind.QUEUE, limits.queue_s),
        (TimeLimitKind.FIRST_TOKEN, limits.first_token_s),
        (TimeLimitKind.TOTAL, limits.total_s),
    )


def _still_applies(limit: TimeLimitKind, seq: Sequence) -> bool:
    if limit is TimeLimitKind.QUEUE:
        return seq.num_preemptions == 0 and seq.status is Status.WAITING
    if limit is TimeLimitKind.FIRST_TOKEN:
        return seq.num_output_tokens == 0
    return True
