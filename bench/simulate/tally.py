"""Measurements of a run, no more than the report needs.

Owns: percentiles of gaps that are counted, not listed; the length of the queue in a bounded list.
Never: virtual time; it is an argument.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from bench.load.report import Distribution, distribution_ms

_MAX_QUEUE_POINTS = 4096


class GapCounts:
    """Times between tokens: hundreds for each request, so equal ones (to 1 us) are counted together."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, gap_s: float, count: int = 1) -> None:
        self._counts[round(gap_s * 1e6)] += count

    def add_all(self, gaps_s: Iterable[float], count: int) -> None:
        """Add each gap `count` times."""
        counts = self._counts
        for gap_s in gaps_s:
            counts[round(gap_s * 1e6)] += count

    def items(self) -> list[tuple[int, int]]:
        """Gaps in microseconds with their counts, in order."""
        return sorted(self._counts.items())

    def include(self, gaps: Iterable[tuple[int, int]]) -> None:
        """Add what `items` returned."""
        for gap_us, count in gaps:
            self._counts[gap_us] += count

    def distribution_ms(self) -> Distribution | None:
        """Return percentiles that occurred: the smallest value that p % of the gaps do not exceed."""
        total = self._counts.total()
        if not total:
            return None
        ordered = self.items()
        return Distribution(
            count=total,
            mean=sum(gap * count for gap, count in ordered) / total / 1e3,
            p50=_at(ordered, 0.50 * total),
            p90=_at(ordered, 0.90 * total),
            p95=_at(ordered, 0.95 * total),
            p99=_at(ordered, 0.99 * total),
            max=ordered[-1][0] / 1e3,
        )


def _at(ordered: list[tuple[int, int]], rank: float) -> float:
    passed = 0
    for gap_us, count in ordered:
        passed += count
        if passed >= rank:
            return gap_us / 1e3
    return ordered[-1][0] / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits that a good request keeps, in seconds; inf does not bind."""

    ttft_s: float
    itl_s: float
    """Limit of the mean time between its tokens."""

    @property
    def binds(self) -> bool:
        return min(self.ttft_s, self.itl_s) < inf

    def __str__(self) -> str:
        bounds = (("TTFT", self.ttft_s), ("mean time between tokens", self.itl_s))
        return " and ".join(
            f"{name} at most {bound_s * 1e3:g} ms" for name, bound_s in bounds if bound_s < inf
        )


@dataclass(slots=True)
class ClassTally:
    """The requests of one priority and tenant."""

    priority: int
    tenant: str
    num_arrived: int = 0
    num_rejected: int = 0
    """Requests that could never fit."""
    num_completed: int = 0
    num_cut_short: int = 0
    """Completed requests that ended before max_tokens, by the context window or alone in a full pool."""
    num_good: int = 0
    """Completed requests that kept to the SLO."""
    num_output_tokens: int = 0
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    first_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    """Numbers of the requests, in the order of `ttft_s`."""
    e2e_s: "array[float]" = field(default_factory=lambda: array("d"))
    gaps: GapCounts = field(default_factory=GapCounts)

    @property
    def name(self) -> str:
        return class_name(self.priority, self.tenant)

    def add(self, other: "ClassTally") -> None:
        """Add the same class of another cell."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ttft_s += other.ttft_s
        self.first_tokens += other.first_tokens
        self.e2e_s += other.e2e_s
        self.gaps.include(other.gaps.items())

    def ttft_ms(self) -> Distribution | None:
        return distribution_ms(self.ttft_s)

    def e2e_ms(self) -> Distribution | None:
        return distribution_ms(self.e2e_s)


_COUNTS = (
    *("num_arrived", "num_rejected", "num_completed", "num_cut_short", "num_good", "num_output_tokens"),
)


def class_name(priority: int, tenant: str) -> str:
    return f"priority {priority}, tenant {tenant}" if tenant else f"priority {priority}"


class QueueLine:
    """Length of the queue over time: at most some thousand points, each the most of its stretch.

    Only changes count, so that steps that change nothing may be left out.
    """

    def __init__(self) -> None:
        self.points: list[tuple[float, int]] = []
        self._last = -1
        self._stride = 1
        self._num_in_last = 0

    def add(self, now_s: float, num_waiting: int) -> None:
        if num_waiting == self._last:
            return
        self._last = num_waiting
        if self.points and self._num_in_last < self._stride:
            start_s, most = self.points[-1]
            self.points[-1] = (start_s, max(most, num_waiting))
            self._num_in_last += 1
            return
        self.points.append((now_s, num_waiting))
        self._num_in_last = 1
        if len(self.points) > _MAX_QUEUE_POINTS:
            pairs = zip(self.points[::2], [*self.points[1::2], self.points[-1]], strict=True)
            self.points = [(first[0], max(first[1], second[1])) for first, second in pairs]
            self._stride *= 2
            self._num_in_last = self._stride
