"""The processes in which chats are rendered, as the API process sees them.

Never: renders in this process: a template can take all memory and all time that there is.
"""

import logging
import queue
import signal
import socket
import subprocess
import threading
import time

import msgspec

from engine.logs.rare_log import RareLog
from engine.processes import child_process
from engine.processes.child_environment import child_environment
from engine.processes.frames import LENGTH, frame
from engine.text.template_messages import (
    CODE_OUT_OF_MEMORY,
    MAX_MEMORY_BYTES,
    Chat,
    Program,
    Rendering,
)

MAX_RENDERERS = 3
_START_TIMEOUT_S = 60.0
_PATIENCE_S = 0.05
"""Time to wait for a process that renders, before another is started. A usual chat takes a millisecond."""
_KEPT_S = 60.0
"""Time for which more processes than one are kept after the last use of two at once: a start takes longer
than many chats."""
_MAX_REPLY_BYTES = 128 * 2**20
_END_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)
_ended = RareLog(
    log, logging.WARNING, "processes that render chats ended before their time: %d; the last one %s: %s"
)


class RendererEnded(Exception):
    """A process ended before it had answered: by itself, if its code is not that of SIGKILL."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class CannotRender(Exception):
    """There is no process to render in; its text says why."""


class _Renderer:
    """One process; for one thread at a time. After an error it is dead."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._channel, theirs = socket.socketpair()
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [*child_process.INTERPRETER, "-m", "engine.text.template_process"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=child_environment(),
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        """Code of a process that has ended."""
        return self._process.wait()

    def ask(self, framed: bytes, timeout_s: float) -> Rendering:
        """Send a message and wait for the answer. Raises TimeoutError, RendererEnded."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self._channel.settimeout(timeout_s)
            self._channel.sendall(framed)
            return self._receive(deadline_s)
        except (ConnectionError, msgspec.DecodeError):
            raise RendererEnded(self._await_end()) from None
        except BaseException:
            self.kill()  # a late answer would be taken for the next one's
            raise

    def kill(self) -> None:
        """End the process. A thread that waits for its answer gets an error."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._channel.close()

    def _receive(self, deadline_s: float) -> Rendering:
        """Read an answer. Raises TimeoutError, ConnectionError, and DecodeError for what is no message."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline_s))
        if length > _MAX_REPLY_BYTES:
            raise msgspec.DecodeError
        return msgspec.msgpack.decode(self._read(length, deadline_s), type=Rendering)

    def _read(self, num_bytes: int, deadline_s: float) -> bytearray:
        content = bytearray(num_bytes)
        left = memoryview(content)
        while left:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            self._channel.settimeout(remaining_s)
            num_read = self._channel.recv_into(left)
            if num_read == 0:
                raise ConnectionError  # it has closed its socket
            left = left[num_read:]
        return content

    def _await_end(self) -> int:
        try:
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it has closed its socket, or sent nonsense, and lives on
            self.kill()
            return 1


class Renderers:
    """One process as a rule, and more while chats are rendered that take long; begun when first asked.

    May be asked by several threads at once.
    """

    def __init__(self, program: Program) -> None:
        self._program = frame(program)
        self._idle: queue.LifoQueue[_Renderer] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._living: set[_Renderer] = set()
        self._several_s = float("-inf")
        """The last time at which more processes than one were in use."""
        self._is_closed = False

    def try_program(self) -> Rendering:
        """Start a process; return its answer: why it cannot use the templates, or their variables.

        Raises TimeoutError, RendererEnded, CannotRender.
        """
        renderer = self._start()
        answer = self._introduce(renderer)
        if answer.refusal:
            self._end(renderer)
        else:
            self._put_back(renderer)
        return answer

    def render(self, chat: Chat, *, timeout_s: float) -> Rendering:
        """Render a chat. Raises TimeoutError, RendererEnded, CannotRender, UnicodeEncodeError."""
        framed = frame(chat)
        renderer = self._take()
        try:
            rendering = self._ask(renderer, framed, timeout_s)
        except BaseException:
            self._end(renderer)
            raise
        self._put_back(renderer)
        return rendering

    def close(self) -> None:
        """End the processes. Threads that wait for one get an error."""
        with self._lock:
            self._is_closed = True
            ending = list(self._living)
        for each in ending:
            each.kill()
        while True:
            try:
                renderer = self._idle.get_nowait()
            except queue.Empty:
                return
            self._end(renderer)

    def _take(self) -> _Renderer:
        while True:
            try:
                renderer = self._idle.get(timeout=_PATIENCE_S if self._living else 0.0)
            except queue.Empty:
                if len(self._living) < MAX_RENDERERS:
                    return self._start_for_a_chat()
                continue
            if renderer.is_alive:
                return renderer
            self._note_end(renderer, "between two chats")
            self._end(renderer)

    def _start_for_a_chat(self) -> _Renderer:
        renderer = self._start()
        try:
            refusal = self._introduce(renderer).refusal
        except (TimeoutError, RendererEnded):
            refusal = "it does not start"
        if refusal:
            self._end(renderer)
            raise CannotRender(refusal)
        return renderer

    def _start(self) -> _Renderer:
        with self._lock:
            if self._is_closed:
                raise CannotRender("the server is shutting down")
            try:
                renderer = _Renderer()
            except OSError as error:
                raise CannotRender(f"it does not start: {error.strerror}") from error
            self._living.add(renderer)
        return renderer

    def _introduce(self, renderer: _Renderer) -> Rendering:
        try:
            return self._ask(renderer, self._program, _START_TIMEOUT_S)
        except BaseException:
            self._end(renderer)
            raise

    def _ask(self, renderer: _Renderer, framed: bytes, timeout_s: float) -> Rendering:
        """Ask a process. Raises TimeoutError, RendererEnded, each with a line in the log without the chat."""
        try:
            return renderer.ask(framed, timeout_s)
        except TimeoutError:
            self._note_end(renderer, f"it had no answer after {timeout_s:g} s")
            raise
        except RendererEnded as error:
            self._note_end(renderer, _reason(error.exit_code))
            raise

    def _note_end(self, renderer: _Renderer, reason: str) -> None:
        if not self._is_closed:
            _ended.note(child_process.describe_exit(renderer.exit_code), reason)

    def _put_back(self, renderer: _Renderer) -> None:
        """Keep a process for the next chat, unless there is one and a second is seldom needed."""
        with self._lock:
            now_s = time.monotonic()
            num_idle = self._idle.qsize()
            if len(self._living) - num_idle > 1:
                self._several_s = now_s
            if not self._is_closed and (num_idle == 0 or now_s - self._several_s < _KEPT_S):
                self._idle.put(renderer)
                return
        self._end(renderer)

    def _end(self, renderer: _Renderer) -> None:
        renderer.close()
        with self._lock:
            self._living.discard(renderer)


def _reason(exit_code: int) -> str:
    if exit_code == CODE_OUT_OF_MEMORY:
        return f"more than {MAX_MEMORY_BYTES >> 20} MiB of memory were asked for"
    if exit_code == -signal.SIGKILL:
        return "from outside, as the kernel does where memory is short"
    return "it failed"
