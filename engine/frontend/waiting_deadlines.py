"""The time limits of requests, compared with the operator's.

Owns: the timers of requests that no engine process has yet (an engine keeps its own limits), and whether a
limit that ran out was the client's choice or the operator's.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import isinf

from scheduler.messages import SequenceId, TimeLimitKind, TimeLimits

_SHORT = 0.5
"""Share of the operator's limit up to which a limit is short by the client's choice."""
_NO_LIMIT_S = 600.0
"""Stands for the operator's limit where there is none: the default of --request-timeout."""


class WaitingDeadlines:
    """Waiting requests by their first sequence id."""

    def __init__(self) -> None:
        self._timers: dict[SequenceId, asyncio.TimerHandle] = {}

    def hold(self, first_id: SequenceId, patience_s: float, give_up: Callable[[], None]) -> None:
        """Call `give_up` after `patience_s`, unless the request is let go before."""
        if not isinf(patience_s):
            loop = asyncio.get_running_loop()
            self._timers[first_id] = loop.call_later(max(patience_s, 0.0), give_up)

    def let_go(self, first_id: SequenceId) -> None:
        timer = self._timers.pop(first_id, None)
        if timer is not None:
            timer.cancel()


def nearer_limits(asked: TimeLimits, allowed: TimeLimits) -> TimeLimits:
    """Take the shorter limit of each kind."""
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


def kinds_named(message: str) -> tuple[TimeLimitKind, ...]:
    """List the limits of which the scheduler's message may speak."""
    known = [kind for kind in TimeLimitKind if kind.value == message]
    # Another message means that computing the prompt took too long: its wait in the queue is over.
    return (known[0],) if known else (TimeLimitKind.FIRST_TOKEN, TimeLimitKind.TOTAL)


def is_own_limit(kinds: Iterable[TimeLimitKind], asked: TimeLimits, allowed: TimeLimits) -> bool:
    """Whether the nearest limit of these kinds, which ran out, was the client's choice.

    It was if the client asked for at most half of the operator's limit. A longer limit may run out because
    the server is slow.
    """
    asked_s, allowed_s = min(
        ((_seconds(asked, kind), _seconds(allowed, kind)) for kind in kinds), key=lambda pair: min(pair)
    )
    return asked_s <= _SHORT * (_NO_LIMIT_S if isinf(allowed_s) else allowed_s)


def _seconds(limits: TimeLimits, kind: TimeLimitKind) -> float:
    if kind is TimeLimitKind.QUEUE:
        return limits.queue_s
    return limits.first_token_s if kind is TimeLimitKind.FIRST_TOKEN else limits.total_s
