"""Forecasts of when waiting sequences start, and of how long prompts take, from the last ones.

Owns: how far starts are apart while something waits, how many more urgent ones come meanwhile, and the line
of seconds over tokens of prompts.
"""

from collections import Counter, deque
from collections.abc import Iterable
from itertools import takewhile

_MAX_GAPS = 256
_MAX_ARRIVALS = 1024
_MIN_STARTS = 2
_LEAST_SHARE = 0.1
"""Share of the starts that is left for a sequence, however many more urgent ones come: no forecast says
that it will never start."""


_DECAY = 0.98
"""Share of an observation's weight that is left with the next: a memory of some fifty prompts."""
_LEAST_VARIANCE = 16.0
"""Variance of the lengths below which a slope cannot be seen."""


class StartForecast:
    """Starts and arrivals of late. Starts count only while others wait: else arrivals set the pace."""

    def __init__(self, *, has_priorities: bool) -> None:
        """`has_priorities`: whether arrivals pass those that are less urgent."""
        self._has_priorities = has_priorities
        self._gaps: deque[tuple[float, int]] = deque(maxlen=_MAX_GAPS)
        """Seconds between starts, and how many started at the end of each."""
        self._sum_s, self._num_starts = 0.0, 0  # of these gaps
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_MAX_ARRIVALS)
        self._last_s: float | None = None
        """Time of the last start; None if nothing has waited since."""
        self._num_at_once = 0
        self._gap_s = 0.0

    def note_arrival(self, priority: int, *, now_s: float) -> None:
        """Note a sequence that came to wait."""
        if self._has_priorities:
            self._arrivals.append((now_s, priority))

    def note_start(self, *, num_waiting: int, now_s: float) -> None:
        """Note a start, and how many are left waiting."""
        if self._last_s is not None and now_s > self._last_s:
            self._close_gap()
            self._gap_s = now_s - self._last_s
        self._num_at_once += 1
        self._last_s = now_s
        if not num_waiting:
            self._close_gap()
            self._last_s = None

    def expected_s(self, num_ahead: int, priority: int, *, now_s: float) -> float | None:
        """Seconds until a sequence with `num_ahead` before it starts; None without starts to tell from."""
        num_starts = self._num_starts + (self._num_at_once if self._gap_s else 0)
        if num_starts < _MIN_STARTS:
            return None
        span_s = self._sum_s + self._gap_s
        if self._last_s is not None:  # a start that is late says something too
            span_s += max(now_s - self._last_s - span_s / num_starts, 0.0)
        pace = num_starts / span_s
        left = pace - self._num_more_urgent(priority, span_s, now_s) / span_s
        return (num_ahead + 1) / max(left, _LEAST_SHARE * pace)

    def _num_more_urgent(self, priority: int, span_s: float, now_s: float) -> float:
        """Arrivals of more urgent sequences in the last `span_s`."""
        recent: Iterable[tuple[float, int]] = takewhile(
            lambda arrival: arrival[0] > now_s - span_s, reversed(self._arrivals)
        )
        by_priority = Counter(each for _, each in recent)
        return sum(num for each, num in by_priority.items() if each < priority)

    def _close_gap(self) -> None:
        """Keep a gap with its starts; those that found nothing waiting have none."""
        if self._gap_s:
            gone_s, num_gone = self._gaps[0] if len(self._gaps) == _MAX_GAPS else (0.0, 0)
            self._gaps.append((self._gap_s, self._num_at_once))
            self._sum_s += self._gap_s - gone_s
            self._num_starts += self._num_at_once - num_gone
        self._gap_s, self._num_at_once = 0.0, 0


class PromptTimes:
    """Seconds from the start of a request to its first token: a line, by least squares with forgetting."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Weights, tokens, seconds, tokens squared, tokens by seconds."""

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take in a prompt and its seconds. Tokens that were cached count too, and make the line flatter."""
        weight, tokens, total_s, squares, products = (_DECAY * each for each in self._sums)
        self._sums = (
            weight + 1.0,
            tokens + num_tokens,
            total_s + seconds,
            squares + num_tokens * num_tokens,
            products + num_tokens * seconds,
        )

    def expected_s(self, num_tokens: int) -> float | None:
        """Seconds for a prompt of `num_tokens`; None before the first was seen."""
        weight, tokens, total_s, squares, products = self._sums
        if not weight:
            return None
        mean, mean_s = tokens / weight, total_s / weight
        variance = squares / weight - mean * mean
        slope_s = (
            max((products / weight - mean * mean_s) / variance, 0.0) if variance > _LEAST_VARIANCE else 0.0
        )
        return max(mean_s - slope_s * mean, 0.0) + slope_s * num_tokens
