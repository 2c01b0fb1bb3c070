"""The processes in which chats are rendered, as the API process sees them.

Owns: their start, their number, the time that a rendering may take, and their end.
Never: renders in this process: a template can take all memory and all time that there is.
"""

import queue
import socket
import subprocess
import threading
import time

from engine.processes import child_process
from engine.processes.child_environment import child_environment
from engine.text.template_messages import Chat, Ended, Program, Rendering, frame, receive

MAX_RENDERERS = 3
_START_TIMEOUT_S = 60.0
_PATIENCE_S = 0.05
"""Time to wait for a process that renders, before another is started. A usual chat takes a millisecond."""
_MAX_REPLY_BYTES = 128 * 2**20
_END_TIMEOUT_S = 5.0


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
                stdout=subprocess.DEVNULL,
                env=child_environment(),
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, framed: bytes, timeout_s: float) -> Rendering:
        """Send a message and wait for the answer. Raises TimeoutError, RendererEnded."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self._channel.settimeout(timeout_s)
            self._channel.sendall(framed)
            return receive(self._channel, Rendering, max_bytes=_MAX_REPLY_BYTES, deadline_s=deadline_s)
        except (Ended, ConnectionError):
            raise RendererEnded(self._await_end()) from None
        except BaseException:
            self.kill()  # a late answer would be taken for the next one's
            raise

    def kill(self) -> None:
        """End the process. Whoever waits for its answer sees its end."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._channel.close()

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
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """The processes' ids, for tests."""
        return [each.pid for each in self._living]

    def try_program(self) -> str:
        """Start a process; return why it cannot use the templates, or nothing. Raises as `render` does."""
        renderer = self._start()
        refusal = self._introduce(renderer)
        if refusal:
            self._end(renderer)
        else:
            self._put_back(renderer)
        return refusal

    def render(self, chat: Chat, *, timeout_s: float) -> Rendering:
        """Raises TimeoutError, RendererEnded, CannotRender, UnicodeEncodeError for half a surrogate pair."""
        framed = frame(chat)
        renderer = self._take()
        try:
            rendering = renderer.ask(framed, timeout_s)
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
        while not self._idle.empty():
            self._end(self._idle.get_nowait())

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
            self._end(renderer)

    def _start_for_a_chat(self) -> _Renderer:
        renderer = self._start()
        try:
            refusal = self._introduce(renderer)
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

    def _introduce(self, renderer: _Renderer) -> str:
        try:
            return renderer.ask(self._program, _START_TIMEOUT_S).refusal
        except BaseException:
            self._end(renderer)
            raise

    def _put_back(self, renderer: _Renderer) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.put(renderer)
                return
        self._end(renderer)

    def _end(self, renderer: _Renderer) -> None:
        renderer.close()
        with self._lock:
            self._living.discard(renderer)
