"""One step as a line of JSON, for the trace file and for viewers.

Owns: the form of a line, and the events since the line before.
Never: writes or sends a line (step_trace.py, step_watch.py).

Times are in seconds of the engine's monotonic clock; sequences are given by their ids.
"""

from collections.abc import Iterable

import orjson

from engine.process_messages import AddRequest, StepTimes
from scheduler.counters import SchedulerStats
from scheduler.messages import SchedulerOutput, SequenceId


class StepLines:
    """Builds a line for each step; arrivals and ends are noted between steps."""

    def __init__(self) -> None:
        self._arrived: list[SequenceId] = []
        self._requests: list[tuple[SequenceId, str, str]] = []
        self._ended: list[SequenceId] = []
        self._last_times = StepTimes()

    def note_arrivals(self, request: AddRequest) -> None:
        """Note sequences that were added to the scheduler, and the names of their request if it has any."""
        self._arrived.extend(request.sequence_ids)
        if request.request_id:
            self._requests.append((request.sequence_ids[0], request.request_id, request.trace_id))

    def note_ends(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Note aborted sequences. Other ends are in the plans, as released sequences."""
        self._ended.extend(sequence_ids)

    def begin_at(self, times: StepTimes) -> None:
        """Let the next line hold the times since these totals."""
        self._last_times = times

    def line(
        self,
        plan: SchedulerOutput,
        *,
        now_s: float,
        stats: SchedulerStats,
        waiting: dict[str, int],
        times: StepTimes,
    ) -> bytes:
        """Build the line of one step, with everything that was noted since the last line."""
        scheduled, last = plan.scheduled, self._last_times
        decodes = [(share[0], share[1]) for share in scheduled if share[2] == 1]
        chunks = [(share[0], share[1], share[2]) for share in scheduled if share[2] > 1]
        document = {
            "step": plan.step,
            "time_s": now_s,
            "schedule_s": times.schedule_s - last.schedule_s,
            "execute_s": times.execute_s - last.execute_s,
            "update_s": times.update_s - last.update_s,
            "num_tokens": plan.num_scheduled_tokens,
            "num_decodes": len(decodes),
            # Keys that are read: for each entry, all up to its last token.
            "num_context_tokens": sum([share[1] + share[2] for share in scheduled]),
            "decodes": decodes,  # [sequence, position]
            "chunks": chunks,  # [sequence, position of the first token, number of tokens]
            "arrived": self._arrived,
            "requests": self._requests,  # [first sequence of those that arrived, request id, trace id]
            "new": [new.sequence_id for new in plan.new_sequences],
            "released": plan.released,
            "ended": self._ended,
            "preemptions": [preemption._asdict() for preemption in plan.preemptions],
            "num_swapped_out_blocks": len(plan.swap_out),
            "num_swapped_in_blocks": len(plan.swap_in),
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_swapped": stats.num_swapped,
            "num_used_blocks": stats.num_used_blocks,
            "num_blocks": stats.num_blocks,
            "waiting": waiting,
        }
        if plan.draft_choice is not None:
            document["drafts"] = plan.draft_choice._asdict()
        self._arrived, self._requests, self._ended, self._last_times = [], [], [], times
        return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
