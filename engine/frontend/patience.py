"""The time limits of requests that no engine process has.

Owns: until when each of them waits; an engine process keeps to the limits of those that it has.
Never: decides which wait, or sends anything (active_requests.py).
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from math import isinf

from scheduler.messages import SequenceId, TimeLimits


class Patience:
    """Waiting requests by their first sequence id."""

    def __init__(self) -> None:
        self._timers: dict[SequenceId, asyncio.TimerHandle] = {}

    def hold(self, first_id: SequenceId, patience_s: float, give_up: Callable[[], None]) -> None:
        """Call `give_up` after `patience_s`, unless the request is let go before."""
        if not isinf(patience_s):
            loop = asyncio.get_running_loop()
            self._timers[first_id] = loop.call_later(max(patience_s, 0.0), give_up)

    def let_go(self, first_id: SequenceId) -> None:
        """Forget a request, if it waits with a limit."""
        timer = self._timers.pop(first_id, None)
        if timer is not None:
            timer.cancel()


def nearer_limits(asked: TimeLimits, allowed: TimeLimits) -> TimeLimits:
    """The limit that runs out first, of each kind."""
    return TimeLimits(
        queue_s=min(asked.queue_s, allowed.queue_s),
        first_token_s=min(asked.first_token_s, allowed.first_token_s),
        total_s=min(asked.total_s, allowed.total_s),
    )


def remaining_limits(limits: TimeLimits, spent_s: float) -> TimeLimits:
    """Subtract the time already spent: the next process counts from when it gets the request."""
    return replace(
        limits,
        queue_s=max(limits.queue_s - spent_s, 0.0),
        first_token_s=max(limits.first_token_s - spent_s, 0.0),
        total_s=max(limits.total_s - spent_s, 0.0),
    )
