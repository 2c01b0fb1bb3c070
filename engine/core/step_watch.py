"""Views of the running engine for viewers, such as the web page.

Never: does anything without a viewer, or spends more than a hundredth of the time on them.

A lease turns the watch on; it must be renewed. A view holds the steps since the last one, the live sequences
and the use of the blocks. Time that a view and its steps took is paid for by waiting a hundred times as long
before the next, so that a large server sends fewer views instead of slower steps. Steps beyond the room of a
view are counted and dropped.
"""

import time
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, Any

import orjson

from engine.core.request_names import RequestNames
from engine.core.step_trace import StepFacts, StepLines
from engine.process_messages import AddRequest, StepTimes, View
from scheduler.blocks.block_map import block_runs
from scheduler.counters import SchedulerStats
from scheduler.messages import ReportPage, SchedulerOutput, SequenceId, SequenceReport

if TYPE_CHECKING:
    from scheduler.scheduler import Scheduler

MIN_INTERVAL_S = 0.1
_IDLE_INTERVAL_S = 1.0
_REST_PER_WORK = 100.0
"""Seconds without a view for each second of work on one."""
_MAX_STEPS = 64
_MAX_PREEMPTING_STEPS = 32
"""Room beyond, for steps that preempted a sequence."""
_MAX_SEQUENCES = 128
"""Sequences of each queue, running and waiting, that a view holds: the first ones."""
_MAX_RUNS = 8192
_SHOWN_STATS = (
    *("num_running", "num_waiting", "num_swapped", "num_used_blocks", "num_blocks"),
    *("num_used_host_blocks", "num_host_blocks", "num_steps", "num_recomputed_tokens"),
    *("num_prefix_queries", "num_prefix_hits"),
)
"""Statistics that a view shows as they are."""


class StepWatch:
    def __init__(
        self,
        scheduler: "Scheduler",
        send: Callable[[View], None],
        names: RequestNames,
        *,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`work_clock` measures work: time that other programs take does not count."""
        self._scheduler = scheduler
        self._send = send
        self._work_clock = work_clock
        self._names = names
        self._until_s = -inf
        self.due_s = inf
        """Time of the next view; infinity without viewers."""
        self._earliest_s = -inf
        self._lines = StepLines()
        self._steps: list[bytes] = []
        self._num_dropped = 0
        self._num_views = 0
        self._spent_s = 0.0

    @property
    def is_on(self) -> bool:
        """Whether there is a viewer."""
        return self.due_s < inf

    def renew(self, *, now_s: float, lease_s: float, times: StepTimes) -> None:
        """Send views until the lease ends. `times` are the totals at this moment."""
        self._until_s = now_s + lease_s
        if not self.is_on:
            self.due_s = now_s
            self._lines.begin_at(times)

    def note_arrivals(self, request: AddRequest) -> None:
        """Note a request whose sequences were added to the scheduler."""
        if self.is_on:
            self._lines.note_arrivals(request)
            self.due_s = min(self.due_s, self._earliest_s)  # it was idle

    def note_ends(self, sequence_ids: Iterable[SequenceId]) -> None:
        if self.is_on:
            self._lines.note_ends(sequence_ids)

    def record(self, plan: SchedulerOutput, facts: StepFacts) -> None:
        """Keep one step for the next view, as StepTrace.record does for its file."""
        if not self.is_on or (plan.is_empty and not plan.preemptions):
            return
        room = _MAX_STEPS + _MAX_PREEMPTING_STEPS if plan.preemptions else _MAX_STEPS
        if len(self._steps) >= room:
            self._num_dropped += 1
            return
        began_s = self._work_clock()
        self._steps.append(self._lines.line(plan, facts).rstrip())
        self._spent_s += self._work_clock() - began_s

    def look(self, *, now_s: float) -> None:
        """Send a view if one is due."""
        if now_s < self.due_s:
            return
        if now_s >= self._until_s:
            self._turn_off()
            return
        began_s = self._work_clock()
        self._send(View(self._document(now_s)))
        self._spent_s += self._work_clock() - began_s
        self._earliest_s = now_s + max(MIN_INTERVAL_S, _REST_PER_WORK * self._spent_s)
        is_idle = not self._scheduler.has_unfinished_requests
        self.due_s = max(self._earliest_s, now_s + _IDLE_INTERVAL_S) if is_idle else self._earliest_s
        self._spent_s = 0.0

    def _turn_off(self) -> None:
        self.due_s = inf
        self._lines, self._steps = StepLines(), []
        self._num_dropped = 0
        self._spent_s = 0.0

    def _document(self, now_s: float) -> bytes:
        steps, self._steps = self._steps, []
        num_dropped, self._num_dropped = self._num_dropped, 0
        self._num_views += 1
        scheduler = self._scheduler
        config, stats = scheduler.config, scheduler.stats()
        running = scheduler.report(ReportPage(0, min(stats.num_running, _MAX_SEQUENCES)), now_s=now_s)
        waiting = scheduler.report(ReportPage(stats.num_running, _MAX_SEQUENCES), now_s=now_s)
        return orjson.dumps(
            {
                "view": self._num_views,
                "time_s": now_s,
                "steps": orjson.Fragment(b"[" + b",".join(steps) + b"]"),
                "num_dropped_steps": num_dropped,
                "running": [self._named(report) for report in running],
                "waiting": [self._named(report) for report in waiting],
                "groups": [list(each) for each in scheduler.group_uses()],
                "blocks": block_runs(scheduler.kv, scheduler.running_sequences(), max_runs=_MAX_RUNS),
                "block_size": config.block_size,
                "max_num_seqs": config.max_num_seqs,
                "policy": config.policy.value,
                "stats": _gauges(stats),
            }
        )

    def _named(self, report: SequenceReport) -> dict[str, Any]:
        return {"request_id": self._names.request_id_of(report.sequence_id), **report._asdict()}


def _gauges(stats: SchedulerStats) -> dict[str, Any]:
    shown = {name: getattr(stats, name) for name in _SHOWN_STATS}
    num_preemptions = sum(stats.num_preemptions.values())
    return {**shown, "wait_reason": stats.wait_reason.value, "num_preemptions": num_preemptions}
