"""The numbers of running and waiting sequences at this moment.

Owns: the last statistics of each engine, and the count of sequences sent since.
"""

from collections.abc import Callable
from typing import NamedTuple

from engine.types import EngineLoad
from scheduler.counters import SchedulerStats
from scheduler.messages import WaitReason


class LiveCounts(NamedTuple):
    """Sequences that the API process has not seen end."""

    num_sent: int
    """Sequences that an engine has."""
    num_in_line: int
    """Its equal part of those that no engine has yet."""


class LiveLoad:
    """The load of all engines. How many sequences run is known by the last beat; all others wait.

    So a wave of requests shows at once, and not with the next beat.
    """

    def __init__(self, num_engines: int) -> None:
        self.last: dict[int, SchedulerStats] = {}
        """Statistics of the last beat, by engine."""
        self._engines = range(num_engines)
        self.counts: Callable[[int], LiveCounts] = lambda _: LiveCounts(0, 0)
        """Live sequences of an engine now."""

    def num_running(self, engine: int) -> int:
        last = self.last.get(engine)
        return 0 if last is None else min(last.num_running, self.counts(engine).num_sent)

    def num_waiting(self, engine: int) -> int:
        """Sequences that wait at an engine, with its part of the line before all engines."""
        last, live = self.last.get(engine), self.counts(engine)
        num_swapped = 0 if last is None else last.num_swapped
        return max(live.num_sent - self.num_running(engine) - num_swapped, 0) + live.num_in_line

    @property
    def num_waiting_in_all(self) -> int:
        return sum(map(self.num_waiting, self._engines))

    def num_waiting_for(self, reason: WaitReason) -> int:
        """Count all that wait, if this is the reason."""
        return self.num_waiting_in_all if reason is self.wait_reason else 0

    @property
    def wait_reason(self) -> WaitReason:
        """Reason why most sequences wait, as of the last beats."""
        busiest = max(self.last.values(), key=lambda each: each.num_waiting, default=None)
        return WaitReason.STEP if busiest is None or not busiest.num_waiting else busiest.wait_reason

    def summary(self, num_requests: int) -> EngineLoad:
        """Report the work of this moment; the use of the caches is that of the last beats."""
        num_blocks = sum(each.num_blocks for each in self.last.values())
        num_used = sum(each.num_used_blocks for each in self.last.values())
        return EngineLoad(
            num_requests=num_requests,
            num_waiting=self.num_waiting_in_all,
            kv_cache_usage=num_used / num_blocks if num_blocks else 0.0,
        )
