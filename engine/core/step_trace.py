"""A trace of the engine's steps, for `tokenyard trace` and `tokenyard simulate --fit`.

Owns: the trace file.
Never: stops the engine. A failed write ends the trace and is logged once.

Each step is one line of JSON (step_lines.py), of some 12 bytes for each sequence in it, built only if the
operator asks for a trace.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.core.step_lines import StepLines
from engine.process_messages import AddRequest, StepTimes
from scheduler.counters import SchedulerStats
from scheduler.messages import SchedulerOutput, SequenceId

log = logging.getLogger(__name__)

_FLUSH_INTERVAL_S = 1.0
_MAX_PENDING_BYTES = 1 << 20
# A forgotten trace must not fill the disk. This is enough for hours of a large server, days of a small one.
_MAX_FILE_BYTES = 4 << 30


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

    def record(
        self,
        plan: SchedulerOutput,
        *,
        now_s: float,
        stats: SchedulerStats,
        waiting: dict[str, int],
        times: StepTimes,
    ) -> None:
        """Record one step, after its results were taken in.

        `now_s` is the time of planning. `times` are the engine's totals since its start; the line holds the
        differences to the last line. `waiting` is the number of waiting sequences by reason. A plan with
        nothing to compute is recorded only if it preempted a sequence.
        """
        if self._file is None or (plan.is_empty and not plan.preemptions):
            return
        line = self._lines.line(plan, now_s=now_s, stats=stats, waiting=waiting, times=times)
        self._pending.append(line)
        self._num_pending_bytes += len(line)
        if now_s - self._flushed_s >= _FLUSH_INTERVAL_S or self._num_pending_bytes > _MAX_PENDING_BYTES:
            self._flushed_s = now_s
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
