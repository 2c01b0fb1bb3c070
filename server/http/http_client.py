"""One HTTP/1.1 exchange with a server, for the commands that are clients: chat, complete, run-batch.

Owns: the server's address, the connection, the pieces of a reply, server-sent events, and the words when
no reply comes.
Never: the meaning of requests and replies.
Source: h11's documentation of its client role; the event stream format of the HTML standard, section 9.2.
"""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11
import orjson

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "TOKENYARD_API_KEY"
MAX_REPLY_BYTES = 256 * 1024 * 1024
"""Size of a reply that is collected whole: `n` choices with logprobs can be long."""
_READ_BYTES = 64 * 1024
_CONNECT_TIMEOUT_S = 10.0


class NoReply(Exception):
    """The server cannot be reached, or the reply broke off. One line for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Address of a server, and the key for it."""

    host: str
    port: int
    prefix: str
    """Path before /v1, without a slash at its end."""
    is_tls: bool
    api_key: str = field(repr=False)
    """Empty sends none."""

    @classmethod
    def parse(cls, base_url: str, *, api_key: str) -> "Target":
        """Parse `http://host:port`, with or without /v1 behind it. Raises ValueError."""
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
        """The address without the key."""
        return f"http{'s' if self.is_tls else ''}://{self.authority}{self.prefix}"


def key_from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """The first of the keys that a server on this machine would take; empty if there is none."""
    return environment.get(API_KEY_VARIABLE, "").split(",")[0].strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole reply."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class StreamedReply:
    """A reply whose head is there and whose body is on its way."""

    def __init__(self, exchange: "_Exchange", head: h11.Response) -> None:
        self._exchange = exchange
        self.status = head.status_code
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it arrives. Raises NoReply if it is cut off."""
        while isinstance(event := await self._exchange.next_event(), h11.Data):
            yield bytes(event.data)

    async def body(self) -> bytes:
        """Raises NoReply."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > MAX_REPLY_BYTES:
                raise NoReply(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
        return bytes(body)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The payloads of a stream of server-sent events, up to its end or [DONE]. Raises NoReply."""
        buffer = b""
        async for piece in self.pieces():
            *blocks, buffer = (buffer + piece).replace(b"\r\n", b"\n").split(b"\n\n")
            for block in blocks:
                data = b"\n".join(
                    line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")
                )
                if data == b"[DONE]":
                    return
                if data:
                    yield _as_object(data)


def _as_object(data: bytes) -> dict[str, Any]:
    try:
        payload = orjson.loads(data)
    except orjson.JSONDecodeError:
        payload = None
    if not isinstance(payload, dict):
        raise NoReply("the server sent an event that is not a JSON object")
    return payload


@contextlib.asynccontextmanager
async def request(
    target: Target, method: str, path: str, body: bytes = b"", *, silence_s: float
) -> AsyncGenerator[StreamedReply, None]:
    """Send a request on a connection of its own; leaving closes it, which ends the request.

    Raises NoReply, also after `silence_s` seconds without a byte from the server.
    """
    exchange = await _connect(target, silence_s)
    try:
        yield await exchange.send(_head(target, method, path, body), body)
    finally:
        await exchange.close()


async def fetch(target: Target, method: str, path: str, body: bytes = b"", *, silence_s: float) -> Reply:
    """The whole reply. Raises NoReply."""
    async with request(target, method, path, body, silence_s=silence_s) as reply:
        return Reply(status=reply.status, headers=reply.headers, body=await reply.body())


def _head(target: Target, method: str, path: str, body: bytes) -> h11.Request:
    headers = [
        ("Host", target.authority),
        ("User-Agent", "tokenyard"),
        ("Accept", "application/json, text/event-stream"),
        ("Connection", "close"),
        ("Content-Length", str(len(body))),
    ]
    if body:
        headers.append(("Content-Type", "application/json"))
    if target.api_key:
        headers.append(("Authorization", f"Bearer {target.api_key}"))
    return h11.Request(method=method, target=f"{target.prefix}{path}", headers=headers)


async def _connect(target: Target, silence_s: float) -> "_Exchange":
    context = ssl.create_default_context() if target.is_tls else None
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
    except TimeoutError:
        raise NoReply(f"{target.url} does not answer") from None
    except OSError as error:
        raise NoReply(f"{target.url} cannot be reached ({error.strerror or error})") from None
    return _Exchange(reader, writer, silence_s)


class _Exchange:
    """One connection, one request, one reply."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._silence_s = silence_s
        self._protocol = h11.Connection(h11.CLIENT)

    async def send(self, head: h11.Request, body: bytes) -> StreamedReply:
        parts = (head, *([h11.Data(data=body)] if body else []), h11.EndOfMessage())
        self._writer.write(b"".join(self._protocol.send(part) or b"" for part in parts))
        # No drain: a server that refuses a body early must be heard, not waited for.
        while not isinstance(event := await self.next_event(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise NoReply("the server closed the connection without a reply")
        return StreamedReply(self, event)

    async def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Wait for the next event of the reply. Raises NoReply."""
        try:
            while (event := self._protocol.next_event()) is h11.NEED_DATA:
                async with asyncio.timeout(self._silence_s):
                    self._protocol.receive_data(await self._reader.read(_READ_BYTES))
        except TimeoutError:
            raise NoReply(f"the server has been silent for {self._silence_s:g} s") from None
        except OSError as error:
            raise NoReply(f"the connection broke ({error.strerror or error})") from None
        except h11.RemoteProtocolError as error:
            raise NoReply(f"the reply broke off, or is not HTTP ({error})") from None
        return event

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
