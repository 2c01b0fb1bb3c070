"""Steps as lines of JSON, and the file of them for `tokenyard trace` and `tokenyard simulate --fit`.

Never: stops the engine. A failed write ends the trace and is logged once.

Each line has some 12 bytes for each sequence in it; it is built only for a trace or a viewer (step_watch.py).
Times are in seconds of the engine's monotonic clock; sequences are given by their ids.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from engine.process_messages import AddRequest, StepTimes
from scheduler.counters import SchedulerStats
from scheduler.messages import SchedulerOutput, SequenceId

log = logging.getLogger(__name__)

_FLUSH_INTERVAL_S = 1.0
_MAX_PENDING_BYTES = 1 << 20
# A forgotten trace must not fill the disk. This is enough for hours of a large server, days of a small one.
_MAX_FILE_BYTES = 4 << 30


class StepFacts(NamedTuple):
    now_s: float
    """Time of planning."""
    stats: SchedulerStats
    waiting: dict[str, int]
    """Number of waiting sequences by reason."""
    times: StepTimes
    """Totals since the engine's start; the line holds the differences to the last line."""


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
        """Set the totals from which the times of the next line count."""
        self._last_times = times

    def line(self, plan: SchedulerOutput, facts: StepFacts) -> bytes:
        """Build the line of one step, with everything that was noted since the last line."""
        scheduled, last = plan.scheduled, self._last_times
        now_s, stats, waiting, times = facts
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


class StepTrace:
    """The trace file. Lines are appended, so the next engine process goes on where the last one ended.

    Raises OSError if the file cannot be opened; later errors are logged.
    """

    def __init__(self, path: Path, *, max_file_bytes: int = _MAX_FILE_BYTES) -> None:
        self._path = path
        self._file: Any = open(path, "ab", buffering=0)  # noqa: SIM115  (it stays open as long as the engine runs)
        self._num_bytes_left = max_file_bytes - path.stat().st_size
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._flushed_s = float("-inf")
        self._lines = StepLines()

    def note_arrivals(self, request: AddRequest) -> None:
        """Note a request whose sequences were added to the scheduler, for the next line."""
        if self._file is not None:
            self._lines.note_arrivals(request)

    def note_ends(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Note aborted sequences. Other ends are in the plans, as released sequences."""
        if self._file is not None:
            self._lines.note_ends(sequence_ids)

    def record(self, plan: SchedulerOutput, facts: StepFacts) -> None:
        """Record one step, after its results were taken in.

        A plan with nothing to compute is recorded only if it preempted a sequence.
        """
        if self._file is None or (plan.is_empty and not plan.preemptions):
            return
        line = self._lines.line(plan, facts)
        self._pending.append(line)
        self._num_pending_bytes += len(line)
        if facts.now_s - self._flushed_s >= _FLUSH_INTERVAL_S or self._num_pending_bytes > _MAX_PENDING_BYTES:
            self._flushed_s = facts.now_s
            self.flush()

    def flush(self) -> None:
        """Write pending lines. The loop calls it before it waits, so that no line is held back."""
        if self._file is None or not self._pending:
            return
        data = b"".join(self._pending)
        self._pending, self._num_pending_bytes = [], 0
        if len(data) > self._num_bytes_left:
            self._stop("it has reached its largest size")
            return
        try:
            while data:  # an almost full disk takes a part
                num_written = self._file.write(data)
                self._num_bytes_left -= num_written
                data = data[num_written:]
        except OSError as error:
            self._stop(error.strerror or str(error))

    def close(self) -> None:
        """Write pending lines and close the file. May be called twice."""
        self.flush()
        if self._file is not None:
            self._close_file()

    def _stop(self, reason: str) -> None:
        log.error("the trace of steps in %s ends here: %s", self._path, reason)
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        self._pending, self._lines = [], StepLines()
        try:
            file.close()
        except OSError as error:
            log.error("closing the trace of steps in %s: %s", self._path, error)
