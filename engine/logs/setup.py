"""The log of a process: one handler, one form, one thread that writes.

Logging never waits for a reader: lines are queued, and dropped where the queue is full. Both processes write
to the same stderr, each line with one call of os.write: a thread stuck in a full pipe would hold the lock of
sys.stderr, and the interpreter could not exit. The stacks that faulthandler writes for a hung or dying
process bypass the queue.
"""

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from engine.logs.lines import JsonLines, LineFormatter, LogFormat, ProcessName, TextLines

STDERR = 2
_FLUSH_S = 2.0
_MAX_PENDING_BYTES = 4 << 20
_RETRY_S = 1.0
_OURS = ("server", "engine", "scheduler", "worker", "bench", "__main__")
"""Our loggers. Libraries log from WARNING on: their lesser messages may quote a request."""

log = logging.getLogger(__name__)

_running: list["Logs"] = []
"""The Logs in use, at most one: Python's logging is global to a process."""


def num_dropped_lines() -> int:
    """Count the lines of this process's log that were dropped so far."""
    return sum(logs.num_dropped for logs in _running)


ERASE_LINE = b"\r\x1b[K"
"""Moves a terminal's cursor to the beginning of its line, and empties the line."""


class LineWriter:
    """The queue and its thread. Threads may share it; lines put after `close` are dropped."""

    def __init__(
        self,
        descriptor: int,
        *,
        describe_loss: Callable[[int], bytes],
        max_pending_bytes: int = _MAX_PENDING_BYTES,
    ) -> None:
        """Start the thread. `describe_loss` makes the line that reports how many were dropped before it."""
        self._descriptor = descriptor
        self._describe_loss = describe_loss
        self._max_pending_bytes = max_pending_bytes
        self._lines: deque[bytes] = deque()
        self._num_pending_bytes = 0
        self._num_unreported = 0
        self.num_dropped = 0
        """Lines dropped so far."""
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line, or count it as dropped; return at once."""
        with self._changed:
            if self._is_closing or self._num_pending_bytes + len(line) > self._max_pending_bytes:
                self._drop()
                return
            self._report_loss()  # in the place of the lost lines
            self._append(line)
            self._changed.notify()

    def close(self, *, timeout_s: float) -> None:
        """Write pending lines for `timeout_s` at most. May be called twice."""
        with self._changed:
            self._report_loss()
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._is_closing:
                    self._changed.wait()
                if not self._lines:
                    return
                line = self._lines.popleft()
            self._write(line)
            with self._changed:
                self._num_pending_bytes -= len(line)

    def _write(self, line: bytes) -> None:
        """Write a line; a full disk, or a reader that has gone, drops it."""
        try:
            while line:
                with contextlib.suppress(BlockingIOError):
                    line = line[os.write(self._descriptor, line) :]
                    continue
                select.select([], [self._descriptor], [], _RETRY_S)
        except OSError:
            with self._changed:
                self._drop()

    def _append(self, line: bytes) -> None:
        self._num_pending_bytes += len(line)
        self._lines.append(line)

    def _report_loss(self) -> None:
        if self._num_unreported:
            num_lost, self._num_unreported = self._num_unreported, 0
            self._append(self._describe_loss(num_lost))

    def _drop(self) -> None:
        self.num_dropped += 1
        self._num_unreported += 1


class Logs:
    """A context in which all logging of this process, and errors that end a thread, go through one queue."""

    def __init__(
        self, log_format: LogFormat, *, level: int, process: ProcessName, descriptor: int = STDERR
    ) -> None:
        self._is_text = log_format is LogFormat.TEXT or (
            log_format is LogFormat.AUTO and os.isatty(descriptor)
        )
        self._level = level
        self._formatter: LineFormatter = (TextLines if self._is_text else JsonLines)(process)
        self._writer = LineWriter(descriptor, describe_loss=self._describe_loss)
        # A bar of progress, perhaps another process's, may stand where the line begins on a terminal.
        begins_with = ERASE_LINE if self._is_text and os.isatty(descriptor) else b""
        self._handler = _QueuedHandler(self._writer, self._formatter, begins_with)
        self._before: list[tuple[logging.Logger, int]] = []
        self._handlers_before: list[logging.Handler] = []
        self._hook_before = threading.excepthook

    @property
    def is_text(self) -> bool:
        return self._is_text

    @property
    def num_dropped(self) -> int:
        """Lines dropped because the queue was full or the write failed."""
        return self._writer.num_dropped

    def show(self, text: str) -> None:
        """Write a text as it is, in order with the lines of the log."""
        self._writer.put(text.encode(errors="backslashreplace") + b"\n")

    def __enter__(self) -> "Logs":
        _running.append(self)
        root = logging.getLogger()
        self._handlers_before = root.handlers[:]
        root.handlers[:] = [self._handler]
        self._set_level(root, max(self._level, logging.WARNING))
        for name in _OURS:
            self._set_level(logging.getLogger(name), self._level)
        logging.captureWarnings(True)  # noqa: FBT003 -- its only parameter
        threading.excepthook = _log_end_of_thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        threading.excepthook = self._hook_before
        logging.captureWarnings(False)  # noqa: FBT003 -- its only parameter
        for logger, level in self._before:
            logger.setLevel(level)
        logging.getLogger().handlers[:] = self._handlers_before
        self._handler.close()
        _running.remove(self)

    def _set_level(self, logger: logging.Logger, level: int) -> None:
        self._before.append((logger, logger.level))
        logger.setLevel(level)

    def _describe_loss(self, num_lines: int) -> bytes:
        words, arguments = "%d lines of the log were dropped here: they were not read in time", (num_lines,)
        record = log.makeRecord(log.name, logging.WARNING, __file__, 0, words, arguments, None)
        return self._formatter.encode(record)


class _QueuedHandler(logging.Handler):
    """A handler that forms lines at once, since their arguments may change, and queues them."""

    def __init__(self, writer: LineWriter, formatter: LineFormatter, begins_with: bytes) -> None:
        super().__init__()
        self._writer = writer
        self._lines = formatter
        self._begins_with = begins_with

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line without waiting."""
        try:
            line = self._lines.encode(record)
        except (TypeError, ValueError):  # a mistake in the call; its arguments may hold client data
            record.msg, record.args, record.exc_info = "a line could not be formed: %s", (record.msg,), None
            line = self._lines.encode(record)
        self._writer.put(self._begins_with + line)

    def close(self) -> None:
        """Flush and close; logging.shutdown calls it too."""
        self._writer.close(timeout_s=_FLUSH_S)
        super().close()


def _log_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is None:
        return
    log.critical(
        "a thread ended by an uncaught error", exc_info=(ended.exc_type, ended.exc_value, ended.exc_traceback)
    )
