"""The requests that wait for the next engine process, because the last one died before it began them.

Owns: who waits, in order of arrival, and until when.
Never: decides who may wait, or sends anything (active_requests.py).
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from math import isinf

from scheduler.messages import SequenceId, TimeLimits


class ReplayQueue:
    """Each request is known by the first of its sequences: these are numbered in order of arrival."""

    def __init__(self) -> None:
        self._timers: dict[SequenceId, asyncio.TimerHandle | None] = {}

    def __contains__(self, first_id: SequenceId) -> bool:
        return first_id in self._timers

    def hold(self, first_id: SequenceId, patience_s: float, give_up: Callable[[], None]) -> None:
        """Keep its place; `give_up` is called if it is still here after so long."""
        timer = None
        if not isinf(patience_s):
            timer = asyncio.get_running_loop().call_later(max(patience_s, 0.0), give_up)
        self._timers[first_id] = timer

    def let_go(self, first_id: SequenceId) -> None:
        """It waits no longer, for whatever reason. May be called for one that never did."""
        timer = self._timers.pop(first_id, None)
        if timer is not None:
            timer.cancel()

    def take_all(self) -> list[SequenceId]:
        """In order of arrival; nobody waits afterwards."""
        first_ids = sorted(self._timers)
        for first_id in first_ids:
            self.let_go(first_id)
        return first_ids


def what_is_left(limits: TimeLimits, spent_s: float) -> TimeLimits:
    """Of the time that a request was given: the next process counts from when it gets it."""
    return replace(
        limits,
        queue_s=max(limits.queue_s - spent_s, 0.0),
        first_token_s=max(limits.first_token_s - spent_s, 0.0),
        total_s=max(limits.total_s - spent_s, 0.0),
    )
