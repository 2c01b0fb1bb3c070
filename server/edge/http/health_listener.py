"""Answers to probes: the page that every port shows, and a port of their own with its thread and event loop.

Owns: the limits of the port's connections (number, time, bytes), and the check that the API's event loop
still runs. Work that blocks the API's loop cannot delay an answer here.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

import orjson

from engine.types import Health


class Question(Enum):
    READY = "are requests welcome?"
    LIVE = "does it move, or is a restart the cure?"


def health_page(health: Health, question: Question, degraded: Sequence[str]) -> tuple[bool, bytes]:
    """The answer, and the JSON that explains it. Entries of `degraded` do not change the answer."""
    is_yes = health.is_ready if question is Question.READY else health.is_live
    body = {
        "status": "ok" if is_yes else "unavailable",
        "state": health.state.value,
        "detail": health.detail,
        "progress": round(health.progress, 4),
        "num_steps": health.num_steps,
        "degraded": degraded,
    }
    return is_yes, orjson.dumps(body)


log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
_MAX_HEAD_BYTES = 8 * 1024
_MAX_CONNECTION_S = 2.0
"""A probe asks at once. A connection that does not only holds a place, until a newcomer has none."""
_PULSE_S = 0.25
_GOODBYE_S = 1.0
_QUESTIONS = {
    b"/health": Question.READY,
    b"/health/ready": Question.READY,
    b"/health/live": Question.LIVE,
}


class LoopPulse:
    """Beats as long as the event loop that runs `beat` does."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    async def beat(self) -> None:
        while True:
            self._last_s = time.monotonic()
            await asyncio.sleep(_PULSE_S)

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._last_s


class HealthListener:
    """Use `start` and `close` in the event loop of the API. Its functions are called in another thread."""

    def __init__(
        self,
        listener: socket.socket,
        health: Callable[[], Health],
        *,
        heartbeat_timeout_s: float,
        degraded: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._listener = listener
        self._health = health
        self._degraded = degraded
        self._pulse = LoopPulse()
        self._beating: asyncio.Task[None] | None = None
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._silent: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not asked yet, the oldest first."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        """Return at once; the socket listens already."""
        self._beating = asyncio.create_task(self._pulse.beat())
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Answers under way are cut off."""
        assert self._beating is not None, "start first"
        self._beating.cancel()
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_GOODBYE_S)

    def judge(self) -> Health:
        """The engine's own health, unless the API's event loop stands still."""
        health, silence_s = self._health(), self._pulse.silence_s
        if silence_s <= self._heartbeat_timeout_s:
            return health
        return replace(
            health, is_live=False, detail=f"the event loop of the API has not moved for {silence_s:.0f} s"
        )

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        # Without descriptors the loop tries and logs as often as its backlog says, so that is small; the
        # kernel's own queue need not be.
        server = await asyncio.start_server(
            self._answer, sock=self._listener, limit=_MAX_HEAD_BYTES, backlog=1
        )
        self._listener.listen(_MAX_CONNECTIONS)
        await self._stopping.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one question; one without it in time is closed, or once there are many newer ones."""
        self._silent[writer] = None
        if len(self._silent) > _MAX_CONNECTIONS:
            longest = next(iter(self._silent))
            del self._silent[longest]
            longest.transport.abort()
        try:
            with contextlib.suppress(OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_MAX_CONNECTION_S):
                    writer.write(self._reply(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
        finally:
            self._silent.pop(writer, None)
            writer.close()

    def _reply(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _reply(b"400 Bad Request", b"")
        method, target, _ = words
        question = _QUESTIONS.get(target.partition(b"?")[0])
        if question is None:
            return _reply(b"404 Not Found", b"")
        if method not in (b"GET", b"HEAD"):
            return _reply(b"405 Method Not Allowed", b"", b"allow: GET, HEAD\r\n")
        is_yes, body = health_page(self.judge(), question, self._degraded())
        reply = _reply(b"200 OK" if is_yes else b"503 Service Unavailable", body)
        return reply.removesuffix(body) if method == b"HEAD" else reply


def _reply(status: bytes, body: bytes, headers: bytes = b"") -> bytes:
    return (
        b"HTTP/1.1 %s\r\n%scontent-type: application/json\r\ncontent-length: %d\r\n"
        b"cache-control: no-store\r\nconnection: close\r\n\r\n%s" % (status, headers, len(body), body)
    )
