"""One HTTP/1.1 exchange on a connection of its own, for commands that are clients and for the load client.

Owns: where the server is, the bytes of a request, the connection, how long to wait, and the kinds of failure
below HTTP.
Source: RFC 9112; asyncio's documentation of BufferedProtocol; docs/decisions/dependencies.md#one-http-client.

An asyncio protocol rather than streams or a library: the load client runs on the machine of the server
that it measures, and here a token costs a callback, not a task switch through several layers.
"""

import asyncio
import contextlib
import os
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from server.edge.http.reply_parser import EventParser, ReplyParser
from server.edge.http.reply_parser import ExchangeFailed as ExchangeFailed
from server.edge.http.reply_parser import Reply as Reply

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "TOKENYARD_API_KEY"
MAX_REPLY_BYTES = 256 * 1024 * 1024
"""Largest reply that is collected whole: `n` choices with logprobs can be long."""
_CONNECT_TIMEOUT_S = 10.0
_MAX_WAITING_EVENTS = 256
"""Events of a stream that may wait for their reader before the connection is read no further."""

_RECEIVED = memoryview(bytearray(65_536))
"""One for all connections, since each read is taken out at once: a fresh quarter MiB for each read, as
asyncio makes for a plain protocol, costs more than all that is done with the few bytes in it."""

EventSink = Callable[[bytes, float], None]
"""Takes the data of one event and the time at which it arrived, in seconds of time.perf_counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Address of a server, and the key that it asks for."""

    host: str
    port: int
    prefix: str
    """Path before /v1, without a slash at its end."""
    is_tls: bool
    api_key: str = field(repr=False)
    """Empty sends none."""

    @classmethod
    def parse(cls, base_url: str, *, api_key: str = "") -> "Target":
        """Read `http://host:port`, with or without /v1 behind it. Raises ValueError."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected http://host:port, got {base_url!r}")
        is_tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if is_tls else 80),
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
            is_tls=is_tls,
            api_key=api_key,
        )

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Address without the key."""
        return f"http{'s' if self.is_tls else ''}://{self.authority}{self.prefix}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Build the bytes of a request. Each has its own connection, as if each came from another user."""
        head = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.authority}",
            "User-Agent: tokenyard",
            "Accept: application/json, text/event-stream",
            "Connection: close",
        ]
        if body:
            head.append("Content-Type: application/json")
        if body or method == "POST":
            head.append(f"Content-Length: {len(body)}")
        if self.api_key:
            head.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*head, "\r\n"]).encode() + body


def key_from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Return the first of the keys that a server on this machine would take; empty if there is none."""
    return environment.get(API_KEY_VARIABLE, "").split(",")[0].strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits of a client's patience, in seconds; None is without a limit."""

    whole_s: float | None = None
    """From the first packet to the last byte of the reply."""
    connect_s: float | None = None
    silence_s: float | None = None
    """Between one piece of a reply and the next."""


class _Exchange(asyncio.BufferedProtocol):
    """Sends one request and resolves `done` with its reply; a stream's events go to `on_event`."""

    def __init__(self, wire: bytes, on_event: EventSink, silence_s: float | None) -> None:
        self._wire = wire
        self._on_event = on_event
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Reply] = self._loop.create_future()
        self._reply = ReplyParser()
        self._events = EventParser()
        self._body = bytearray()
        self._heard_s = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._wire)
        self._heard_s = time.perf_counter()
        if self._silence_s is not None:
            self._alarm = self._loop.call_later(self._silence_s, self._check_silence, self._silence_s)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # the signature is asyncio's
        return _RECEIVED

    def buffer_updated(self, nbytes: int) -> None:
        now_s = self._heard_s = time.perf_counter()
        data = bytes(_RECEIVED[:nbytes])
        if self.done.done():
            return
        try:
            self._take(self._reply.feed(data), now_s)
        except ExchangeFailed as failure:
            self.done.set_exception(failure)
            return
        if self._reply.is_complete:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if exc is not None:
            why = (exc.strerror if isinstance(exc, OSError) else None) or exc
            self.done.set_exception(ExchangeFailed("connection reset", f"the connection broke ({why})"))
            return
        try:
            self._reply.end()
        except ExchangeFailed as failure:
            self.done.set_exception(failure)
            return
        self._finish()

    def pause(self) -> None:
        """Read no further until `resume`: the server's own limits on slow readers then apply."""
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._is_paused:
            self._is_paused = False
            self._heard_s = time.perf_counter()
            self._transport.resume_reading()

    def close(self) -> None:
        """End the connection; the server stops its work."""
        self.done.cancel()  # a connection that was just being made is lost later, and would report it
        if self._alarm is not None:
            self._alarm.cancel()
        if self._transport is not None:
            self._transport.abort()
        # A failure that is not waited for any more must not be reported as forgotten.
        with contextlib.suppress(asyncio.InvalidStateError, asyncio.CancelledError):
            self.done.exception()

    def _take(self, body: bytes, now_s: float) -> None:
        if not body:
            return
        if self._reply.is_event_stream:
            for data in self._events.feed(body):
                self._on_event(data, now_s)
            return
        self._body += body
        if len(self._body) > MAX_REPLY_BYTES:
            raise ExchangeFailed("reply too long", f"the reply is longer than {MAX_REPLY_BYTES} bytes")

    def _finish(self) -> None:
        self.done.set_result(
            Reply(status=self._reply.status, body=bytes(self._body), headers=self._reply.headers)
        )

    def _check_silence(self, silence_s: float) -> None:
        """Check the time of the last byte. One timer runs on, so that an event starts no new one."""
        if self.done.done():
            return
        now_s = time.perf_counter()
        left_s = silence_s if self._is_paused else self._heard_s + silence_s - now_s
        if left_s > 0:
            self._alarm = self._loop.call_later(left_s, self._check_silence, silence_s)
        else:
            said = f"the server has been silent for {silence_s:g} s"
            self.done.set_exception(ExchangeFailed("silence", said))


def _ignore(data: bytes, now_s: float) -> None:
    """Drop an event that the caller did not ask for."""


async def exchange(
    target: Target, wire: bytes, *, timeouts: Timeouts, on_event: EventSink = _ignore
) -> Reply:
    """Send `wire` and return its reply; events of an event stream go to `on_event` as they arrive.

    Raises ExchangeFailed. Cancelling it closes the connection.
    """
    running = _Exchange(wire, on_event, timeouts.silence_s)
    try:
        async with asyncio.timeout(timeouts.whole_s):
            await _connect(target, running, timeouts.connect_s)
            return await running.done
    except TimeoutError:
        raise ExchangeFailed("timeout", f"no whole reply within {timeouts.whole_s:g} s") from None
    finally:
        running.close()


async def fetch(target: Target, method: str, path: str, body: bytes = b"", *, silence_s: float) -> Reply:
    """Return the whole reply. Raises ExchangeFailed, also after `silence_s` without a byte."""
    timeouts = Timeouts(connect_s=_CONNECT_TIMEOUT_S, silence_s=silence_s)
    return await exchange(target, target.request(method, path, body), timeouts=timeouts)


class StreamedReply:
    """A reply whose events are on their way."""

    def __init__(self) -> None:
        self._running: _Exchange | None = None
        self._waiting: deque[bytes] = deque()
        self._changed = asyncio.Event()

    def follow(self, running: _Exchange) -> None:
        self._running = running
        running.done.add_done_callback(lambda _: self._changed.set())

    def push(self, data: bytes, _now_s: float) -> None:
        """Keep an event until it is read."""
        self._waiting.append(data)
        self._changed.set()
        if len(self._waiting) >= _MAX_WAITING_EVENTS and self._running is not None:
            self._running.pause()

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each event, to the end of the reply. Raises ExchangeFailed if it is cut off."""
        assert self._running is not None
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._running.done.done():
                self._running.done.result()
                return
            self._running.resume()
            self._changed.clear()
            await self._changed.wait()

    async def whole(self) -> Reply:
        """The reply once it has ended; its body is empty where there were events. Raises ExchangeFailed."""
        assert self._running is not None
        return await self._running.done


@contextlib.asynccontextmanager
async def open_stream(
    target: Target, method: str, path: str, body: bytes = b"", *, silence_s: float
) -> AsyncGenerator[StreamedReply, None]:
    """Send a request on a connection of its own; leaving closes it, which stops the server's work.

    Raises ExchangeFailed, also after `silence_s` seconds without a byte from the server.
    """
    reply = StreamedReply()
    running = _Exchange(target.request(method, path, body), reply.push, silence_s)
    reply.follow(running)
    try:
        await _connect(target, running, _CONNECT_TIMEOUT_S)
        yield reply
    finally:
        running.close()


async def _connect(target: Target, running: _Exchange, timeout_s: float | None) -> None:
    context = ssl.create_default_context() if target.is_tls else None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: running, target.host, target.port, ssl=context)
    except TimeoutError:
        raise ExchangeFailed("no connection", f"{target.url} does not answer") from None
    except OSError as error:
        said = f"{target.url} cannot be reached ({error.strerror or error})"
        raise ExchangeFailed("no connection", said) from None
