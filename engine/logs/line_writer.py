"""A thread that writes lines to a file descriptor, so that logging never waits for a reader.

Owns: the bounded queue, the thread, and the count of dropped lines.
Never: forms a line (lines.py).

It writes with os.write and not through sys.stderr: a thread stuck in a full pipe would hold that stream's
lock, and the interpreter could not exit.
"""

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

_MAX_PENDING_BYTES = 4 << 20
_RETRY_S = 1.0


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
