"""Deadlines: sequences that have run out of time.

Owns: a heap of the moments at which a time limit of a live sequence runs out.
Never: a clock; the step's time is an argument. So there is one clock, and one place that decides.
"""

from enum import Enum
from heapq import heapify, heappop, heappush
from math import isinf

from scheduler.sequence import Sequence, Status

_COMPACT_ABOVE = 256


class TimeLimitKind(Enum):
    """Event that had to happen in time. The value is the message to the caller."""

    QUEUE = "it waited longer than its queue limit"
    FIRST_TOKEN = "it had no token within its limit for the first one"
    TOTAL = "it took longer than its total limit"


class Deadlines:
    """Heap of deadlines: adding costs O(log n), a step without an expiry O(1)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TimeLimitKind, int]] = []  # the last is Sequence.admission
        # Not in the heap: that keeps its entries until long after most sequences have ended.
        self._live: dict[int, Sequence] = {}
        self._compact_above = _COMPACT_ABOVE

    def add(self, seq: Sequence) -> None:
        """Note the limits of a sequence, once, when it is added."""
        limits = seq.time_limits
        for limit, seconds in (
            (TimeLimitKind.QUEUE, limits.queue_s),
            (TimeLimitKind.FIRST_TOKEN, limits.first_token_s),
            (TimeLimitKind.TOTAL, limits.total_s),
        ):
            if not isinf(seconds):
                # Three entries of one sequence may fall on one moment: the place in the heap decides then.
                place = 3 * seq.admission + _ORDER[limit]
                heappush(self._heap, (seq.admitted_s + seconds, place, limit, seq.admission))
                self._live[seq.admission] = seq
        self._compact()

    def forget(self, seq: Sequence) -> None:
        """Drop a sequence that has ended; it need not have a limit."""
        self._live.pop(seq.admission, None)

    def expired(self, *, now_s: float) -> list[tuple[Sequence, TimeLimitKind]]:
        """Sequences that have run out of time, each once, in the order of the deadlines."""
        if not self._heap or self._heap[0][0] > now_s:
            return []
        found: dict[int, tuple[Sequence, TimeLimitKind]] = {}
        while self._heap and self._heap[0][0] <= now_s:
            _, _, limit, admission = heappop(self._heap)
            seq = self._live.get(admission)
            if seq is not None and _still_applies(limit, seq):
                found.setdefault(admission, (seq, limit))
        return list(found.values())

    def _compact(self) -> None:
        """Drop entries of ended sequences.

        Most end before their deadline, and must not pile up until then.
        """
        if len(self._heap) > self._compact_above:
            self._heap = [entry for entry in self._heap if entry[3] in self._live]
            heapify(self._heap)
            self._compact_above = max(2 * len(self._heap), _COMPACT_ABOVE)


_ORDER = {limit: place for place, limit in enumerate(TimeLimitKind)}


def _still_applies(limit: TimeLimitKind, seq: Sequence) -> bool:
    if limit is TimeLimitKind.QUEUE:
        return seq.num_preemptions == 0 and seq.status is Status.WAITING
    if limit is TimeLimitKind.FIRST_TOKEN:
        return seq.num_output_tokens == 0
    return True
