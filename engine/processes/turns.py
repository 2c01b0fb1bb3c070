"""The line before a small process, whose callers are served by turns of their keys.

Owns: the order, and which gives way where the line is full: the last caller of the key that has most in it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from engine.errors import Overloaded, OverloadReason

ResultT = TypeVar("ResultT")


class _Waiting(NamedTuple):
    key: str
    round: int
    """Each key has one caller in a round."""
    turn: "asyncio.Future[None]"


class TurnsByKey:
    """Places, one for each caller that has its turn, and the line before them."""

    def __init__(self, num_places: int, max_waiting: int, reason: OverloadReason) -> None:
        """Take in the reason of refusals, whose name is that of what waits."""
        self._num_free, self._max_waiting, self._reason = num_places, max_waiting, reason
        self._waiting: list[_Waiting] = []
        self._round = 0
        self.under_way: set[asyncio.Task[Any]] = set()
        """Only this keeps work alive whose caller has left."""

    async def run(self, key: str, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Carry out work in a turn of a key, to its end though its caller leaves.

        To stop it is to replace the process. Raises Overloaded, and whatever the work raises.
        """
        await self.acquire(key)
        return await asyncio.shield(self._begun(work))  # no name holds the result of a caller that has left

    def _begun(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> asyncio.Task[ResultT]:
        task = asyncio.create_task(self._carry_out(work))
        self.under_way.add(task)
        task.add_done_callback(self._end)
        return task

    async def _carry_out(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        try:
            return await work()
        finally:
            self.release()

    def _end(self, task: asyncio.Task[Any]) -> None:
        """Take note of a refusal too, which asyncio would log: its caller may have left."""
        self.under_way.discard(task)
        if not task.cancelled():
            task.exception()

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
            raise self._overloaded()
        last = [each for each in self._waiting if each.key == longest][-1]
        self._waiting.remove(last)
        if not last.turn.done():
            last.turn.set_exception(self._overloaded())

    def _overloaded(self) -> Overloaded:
        text = f"too many {self._reason} wait to be prepared; try again later"
        return Overloaded(text, retry_after_s=1.0, reason=self._reason)
