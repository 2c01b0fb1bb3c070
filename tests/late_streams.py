"""Streams that do nothing until they are told to, and then in any order that a GPU might take."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from random import Random

from torch import Tensor

from worker.devices.copy_streams import Streams


class LateEvent:
    """Comes when its stream gets there."""

    def __init__(self) -> None:
        self.has_come = False

    def query(self) -> bool:
        return self.has_come


class LateStream:
    """See Stream. Each pair of a copy is a piece of work of its own."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object] | LateEvent | _Wait] = deque()
        self.num_waits = 0
        """Number of events it was asked to wait for."""

    def ask(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            self.ask(lambda target=target, source=source: target.copy_(source))

    def record(self) -> LateEvent:
        event = LateEvent()
        self._queue.append(event)
        return event

    def wait(self, event: LateEvent) -> None:
        self.num_waits += 1
        self._queue.append(_Wait(event))

    @property
    def is_done(self) -> bool:
        return not self._queue

    def go_on(self) -> bool:
        """Do one thing; False if it has to wait, or has nothing to do."""
        if not self._queue or (isinstance(self._queue[0], _Wait) and not self._queue[0].event.has_come):
            return False
        first = self._queue.popleft()
        if isinstance(first, LateEvent):
            first.has_come = True
        elif not isinstance(first, _Wait):
            first()
        return True


class _Wait:
    def __init__(self, event: LateEvent) -> None:
        self.event = event


class LateGpu:
    """One GPU's streams."""

    def __init__(self) -> None:
        self.compute, self.out, self.late_out, self.back = (LateStream() for _ in range(4))
        self.streams = Streams(self.compute, self.out, self.late_out, self.back)

    def run(self, order: Sequence[int], most: int = 1 << 30) -> int:
        """Do that many things, each by the first of these streams that can; returns how many were done."""
        done = 0
        while done < most and any(self.streams[place].go_on() for place in order):
            done += 1
        return done

    def run_some(self, random: Random) -> None:
        """Some streams get on, and others stand still."""
        order = random.sample(range(4), random.randint(1, 4))
        self.run(order, random.choice([0, 1, 2, 5, 20]))

    def finish(self, order: Sequence[int] = (0, 1, 2, 3)) -> None:
        self.run(order)
        assert all(stream.is_done for stream in self.streams), "the streams wait for each other for ever"
