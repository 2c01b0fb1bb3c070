"""Forecast of when a waiting sequence starts, from the starts of the last ones.

Owns: the times of recent starts.
Never: a clock; the step's time is an argument.
"""

from collections import deque

_MAX_STARTS = 64
_MIN_STARTS = 2


class StartForecast:
    """A place of the queue takes as long as recent starts were apart; the time since the last counts too."""

    def __init__(self) -> None:
        self._starts_s: deque[float] = deque(maxlen=_MAX_STARTS)

    def note_start(self, now_s: float) -> None:
        """Note that a sequence was admitted."""
        self._starts_s.append(now_s)

    def expected_s(self, place: int, *, now_s: float) -> float | None:
        """Seconds until the sequence at this place starts; None before there is anything to tell from."""
        if len(self._starts_s) < _MIN_STARTS:
            return None
        span_s = max(now_s - self._starts_s[0], 0.0)
        return (place + 1) * span_s / len(self._starts_s)
