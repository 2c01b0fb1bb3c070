"""The order in which a lazy device does what it was asked, stream by stream.

Owns: queues, marks in them, which queue goes on next.
Never: what the work is (lazy_cuda.py).

Work of one stream is done in its order. Between streams there is no order but the one that was asked for: a
stream that waits for a mark of another. Without a seed, work is done as late as that allows: when somebody
waits for a mark, all that the mark needs and nothing else. With a seed, it is done in some order that a real
device might choose, some of it as soon as it is asked, some of it beside what somebody waits for.
"""

import random
from collections import deque
from collections.abc import Callable
from threading import RLock

Work = Callable[[], object]

_HASTES = (0.2, 0.6, 1.0)
"""Probability of one more piece of work before the host goes on. With the last, all is done at once."""


class Mark:
    """A point in the order of a stream."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.is_reached = False


class Queues:
    """Work that was asked for and is not done yet."""

    def __init__(self, seed: int | None) -> None:
        """Without a seed, work is done as late as possible."""
        self._pending: dict[int, deque[Work | Mark | _Wait]] = {}
        self._random = random.Random(seed) if seed is not None else None
        self._haste = _HASTES[seed % len(_HASTES)] if seed is not None else 0.0
        self._lock = RLock()

    def ask(self, stream_id: int, work: Work) -> None:
        with self._lock:
            self._queue(stream_id).append(work)
            while self._is_hasty() and self._advance_any():
                pass

    def mark(self, stream_id: int) -> Mark:
        """The present end of a stream."""
        mark = Mark(stream_id)
        with self._lock:
            queue = self._queue(stream_id)
            if queue:
                queue.append(mark)
            else:
                mark.is_reached = True
        return mark

    def let_wait(self, stream_id: int, mark: Mark) -> None:
        """Let what is asked of the stream from now on come after the mark."""
        with self._lock:
            if not mark.is_reached and mark.stream_id != stream_id:
                self._queue(stream_id).append(_Wait(mark))

    def reach(self, mark: Mark) -> None:
        """Do what comes before it."""
        with self._lock:
            while not mark.is_reached:
                if not (self._is_hasty() and self._advance_any()):
                    self._advance(mark.stream_id)

    def approach(self, mark: Mark) -> bool:
        """Do a little of what comes before it, as time would; whether it is reached."""
        with self._lock:
            if not mark.is_reached:
                self._advance(mark.stream_id)
            return mark.is_reached

    def drain(self) -> None:
        """Do everything."""
        for stream_id in tuple(self._pending):
            self.reach(self.mark(stream_id))

    def _queue(self, stream_id: int) -> "deque[Work | Mark | _Wait]":
        return self._pending.setdefault(stream_id, deque())

    def _is_hasty(self) -> bool:
        return self._random is not None and self._random.random() < self._haste

    def _advance_any(self) -> bool:
        """One thing of some stream that waits for nobody; False if there is none."""
        assert self._random is not None
        ready = [stream_id for stream_id, queue in self._pending.items() if queue and _is_ready(queue[0])]
        if ready:
            self._advance(self._random.choice(ready))
        return bool(ready)

    def _advance(self, stream_id: int) -> None:
        queue = self._pending[stream_id]
        first = queue[0]
        if isinstance(first, _Wait):
            self.reach(first.mark)
        if queue and queue[0] is first:  # what was waited for may have advanced this stream too
            queue.popleft()
            if isinstance(first, Mark):
                first.is_reached = True
            elif not isinstance(first, _Wait):
                first()


class _Wait:
    def __init__(self, mark: Mark) -> None:
        self.mark = mark


def _is_ready(first: "Work | Mark | _Wait") -> bool:
    return not isinstance(first, _Wait) or first.mark.is_reached
