"""The requests held for the next engine process, because the last one died before it began them.

Owns: which requests are held, in order of arrival, and until when.
Never: decides which may be held, or sends anything (active_requests.py).
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from math import isinf

from scheduler.messages import SequenceId, TimeLimits


class ReplayQueue:
    """Held requests by their first sequence id; ids are numbered in order of arrival."""

    def __init__(self) -> None:
        self._timers: dict[SequenceId, asyncio.TimerHandle | None] = {}

    def __contains__(self, first_id: SequenceId) -> bool:
        return first_id in self._timers

    def hold(self, first_id: SequenceId, patience_s: float, give_up: Callable[[], None]) -> None:
        """Hold a request; call `give_up` if it is still held after `patience_s`."""
        timer = None
        if not isinf(patience_s):
            timer = asyncio.get_running_loop().call_later(max(patience_s, 0.0), give_up)
        self._timers[first_id] = timer

    def let_go(self, first_id: SequenceId) -> None:
        """Drop a request, if it is held."""
        timer = self._timers.pop(first_id, None)
        if timer is not None:
            timer.cancel()

    def take_all(self) -> list[SequenceId]:
        """Remove and return all held requests, in order of arrival."""
        first_ids = sorted(self._timers)
        for first_id in first_ids:
            self.let_go(first_id)
        return first_ids


def remaining_limits(limits: TimeLimits, spent_s: float) -> TimeLimits:
    """Subtract the time already spent: the next process counts from when it gets the request."""
    return replace(
        limits,
        queue_s=max(limits.queue_s - spent_s, 0.0),
        first_token_s=max(limits.first_token_s - spent_s, 0.0),
        total_s=max(limits.total_s - spent_s, 0.0),
    )
