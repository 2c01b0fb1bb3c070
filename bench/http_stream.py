"""One HTTP/1.1 exchange on a connection of its own, its reply handed over while it arrives.

Owns: the bytes of request and reply, server-sent events, and the kinds of failure below HTTP.
Never: what requests ask and events mean (load_client.py).
Source: RFC 9112, sections 6 and 7.1; the event stream format of the HTML standard, section 9.2.

An asyncio protocol rather than an HTTP library: the client runs beside the server that it measures, and
here a token costs a callback, not a task switch through several layers of streams.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

_MAX_HEAD_BYTES = 65_536
_MAX_BODY_BYTES = 4 << 20  # of replies that are collected whole

_RECEIVED = memoryview(bytearray(65_536))
"""One for all connections, since each read is taken out at once: a fresh quarter MiB for each read, as
asyncio makes for a plain protocol, costs more than all that is done with the few bytes in it."""

EventSink = Callable[[bytes, float], None]
"""Takes the data of one event and the time at which it arrived, in seconds of time.perf_counter."""


class ExchangeFailed(Exception):
    """No whole reply came. `kind` is short and countable, the text is for a person."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a server is, and how to be let in."""

    host: str
    port: int
    prefix: str
    """Path before /v1, without a slash at its end."""
    is_tls: bool
    api_key: str = field(repr=False)
    """Empty sends none."""

    @classmethod
    def parse(cls, base_url: str) -> "Target":
        """From `http://host:port`, with or without /v1 behind it. Raises ValueError."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected http://host:port, got {base_url!r}")
        is_tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if is_tls else 80),
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
            is_tls=is_tls,
            api_key="",
        )

    def with_key(self, api_key: str) -> "Target":
        return replace(self, api_key=api_key)

    @property
    def url(self) -> str:
        """Without the key."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_tls else ''}://{name}:{self.port}{self.prefix}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request. Each has its own connection, as if each came from another user."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        head = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {name}:{self.port}",
            "User-Agent: tokenyard-bench",
            "Accept: application/json, text/event-stream",
            "Connection: close",
        ]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.api_key:
            head.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*head, "\r\n"]).encode() + body


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole reply. The body is empty where it went to an event sink."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    """By their names in lower case."""


class ReplyParser:
    """Bytes as they come in; head, then decoded pieces of the body. No input or output of its own."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._buffer = bytearray()
        self._left: int | None = None
        """Bytes left of the body or of the chunk; None for a body that ends with the connection."""
        self._is_chunked = False

    def feed(self, data: bytes) -> bytes:
        """Return what `data` adds to the body. Raises ExchangeFailed on what is not HTTP."""
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        return self._read_chunks() if self._is_chunked else self._read_plain()

    def end(self) -> None:
        """The connection is closed. Raises ExchangeFailed if that cut the reply off."""
        if self.status and not self._is_chunked and self._left is None:
            self.is_complete = True
        if not self.is_complete:
            raise ExchangeFailed("connection closed", "the server closed the connection before the end")

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise ExchangeFailed("not HTTP", "the reply has no end of its head")
            return False
        status_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = status_line.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise ExchangeFailed("not HTTP", f"the reply starts with {status_line[:60]!r}")
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self.status = int(words[1])
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length", "")
        self._left = int(length) if length.isdigit() and not self._is_chunked else None
        return True

    def _read_plain(self) -> bytes:
        body = bytes(self._buffer[: self._left])
        del self._buffer[: len(body)]
        if self._left is not None:
            self._left -= len(body)
            self.is_complete = self._left == 0
        return body

    def _read_chunks(self) -> bytes:
        pieces = []
        while not self.is_complete:
            if self._left is None:
                line_end = self._buffer.find(b"\r\n")
                if line_end < 0:
                    break
                self._left = self._chunk_size(bytes(self._buffer[:line_end]))
                del self._buffer[: line_end + 2]
                if self._left == 0:  # trailers may follow, which nobody here reads
                    self.is_complete = True
                    break
            if len(self._buffer) < self._left + 2:
                break
            pieces.append(bytes(self._buffer[: self._left]))
            del self._buffer[: self._left + 2]
            self._left = None
        return b"".join(pieces)

    @staticmethod
    def _chunk_size(line: bytes) -> int:
        try:
            return int(line.partition(b";")[0], 16)
        except ValueError:
            raise ExchangeFailed("not HTTP", f"a chunk starts with {line[:20]!r}") from None


class EventParser:
    """Pieces of an event stream; the data of whole events."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, body: bytes) -> list[bytes]:
        *events, self._buffer = (self._buffer + body).replace(b"\r\n", b"\n").split(b"\n\n")
        return [data for data in map(self._data_of, events) if data]

    @staticmethod
    def _data_of(event: bytes) -> bytes:
        lines = (line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))
        return b"\n".join(lines)


class _Exchange(asyncio.BufferedProtocol):
    """Sends one request and resolves `done` with its reply."""

    def __init__(self, request: bytes, on_event: EventSink, done: "asyncio.Future[Reply]") -> None:
        self._request = request
        self._on_event = on_event
        self._done = done
        self._reply = ReplyParser()
        self._events = EventParser()
        self._body = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # the signature is asyncio's
        return _RECEIVED

    def buffer_updated(self, nbytes: int) -> None:
        now_s = time.perf_counter()
        data = bytes(_RECEIVED[:nbytes])
        if self._done.done():
            return
        try:
            self._take(self._reply.feed(data), now_s)
        except ExchangeFailed as failure:
            self._done.set_exception(failure)
            return
        if self._reply.is_complete:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done.done():
            return
        if exc is not None:
            self._done.set_exception(ExchangeFailed("connection reset", str(exc)))
            return
        try:
            self._reply.end()
        except ExchangeFailed as failure:
            self._done.set_exception(failure)
            return
        self._finish()

    def _take(self, body: bytes, now_s: float) -> None:
        if not body:
            return
        if self._reply.headers.get("content-type", "").startswith("text/event-stream"):
            for data in self._events.feed(body):
                self._on_event(data, now_s)
            return
        self._body += body
        if len(self._body) > _MAX_BODY_BYTES:
            raise ExchangeFailed("reply too long", f"more than {_MAX_BODY_BYTES} bytes")

    def _finish(self) -> None:
        self._done.set_result(
            Reply(status=self._reply.status, body=bytes(self._body), headers=self._reply.headers)
        )


def _ignore(data: bytes, now_s: float) -> None:
    """Take an event that nobody asked for."""


async def exchange(
    target: Target, request: bytes, *, timeout_s: float, on_event: EventSink = _ignore
) -> Reply:
    """Send `request` and return its reply; events of an event stream go to `on_event` as they arrive.

    Raises ExchangeFailed, also when all is not done after `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Reply] = loop.create_future()
    context = ssl.create_default_context() if target.is_tls else None
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                lambda: _Exchange(request, on_event, done), target.host, target.port, ssl=context
            )
            return await done
    except TimeoutError:
        raise ExchangeFailed("timeout", f"no whole reply within {timeout_s:g} s") from None
    except OSError as error:
        raise ExchangeFailed("no connection", str(error)) from None
    finally:
        done.cancel()  # a connection that was just being made is lost later, and would report it
        if isinstance(transport, asyncio.Transport):
            transport.abort()
        # A failure that nobody waits for any more must not be reported as forgotten.
        with contextlib.suppress(asyncio.InvalidStateError, asyncio.CancelledError):
            done.exception()
