"""Places for pictures, whose waiting callers are served by turns of their keys.

Owns: the order, and which gives way where the line is full: the last caller of the key that has most in it.
Never: knows what is done in a place.
"""

import asyncio
from collections import Counter
from typing import NamedTuple

from engine.errors import Overloaded, OverloadReason


class _Waiting(NamedTuple):
    key: str
    round: int
    """Each key has one caller in a round."""
    turn: "asyncio.Future[None]"


class TurnsByKey:
    """Places, and the line before them."""

    def __init__(self, num_places: int, max_waiting: int) -> None:
        self._num_free, self._max_waiting = num_places, max_waiting
        self._waiting: list[_Waiting] = []
        self._round = 0

    async def acquire(self, key: str) -> None:
        """Wait for a place, which `release` gives back. Raises Overloaded, also while it waits."""
        if self._num_free:
            self._num_free -= 1
            return
        self._make_room(key)
        last = max([each.round for each in self._waiting if each.key == key], default=self._round)
        own = _Waiting(key, last + 1, asyncio.get_running_loop().create_future())
        self._waiting.append(own)
        try:
            await own.turn
        except asyncio.CancelledError:
            if own in self._waiting:
                self._waiting.remove(own)
            elif not own.turn.cancelled() and own.turn.exception() is None:
                self.release()
            raise

    def release(self) -> None:
        """Give a place to the next caller, or back."""
        while self._waiting:
            first = min(self._waiting, key=lambda each: each.round)
            self._waiting.remove(first)
            if not first.turn.done():  # else its caller is about to leave
                self._round = first.round
                first.turn.set_result(None)
                return
        self._num_free += 1

    def _make_room(self, key: str) -> None:
        if len(self._waiting) < self._max_waiting:
            return
        numbers = Counter(each.key for each in self._waiting)
        [(longest, num)] = numbers.most_common(1)
        if num <= numbers[key] + 1:
            raise _overloaded()
        last = [each for each in self._waiting if each.key == longest][-1]
        self._waiting.remove(last)
        if not last.turn.done():
            last.turn.set_exception(_overloaded())


def _overloaded() -> Overloaded:
    text = "too many pictures wait to be prepared; try again later"
    return Overloaded(text, retry_after_s=1.0, reason=OverloadReason.PICTURES)
