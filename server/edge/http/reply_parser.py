"""Bytes of an HTTP/1.1 reply as they come in: head, decoded pieces of the body, server-sent events.

Owns: the framing of replies, and its limits.
Source: RFC 9112, sections 6 and 7.1; the event stream format of the HTML standard, section 9.2.

Not h11, which does the same three times as slowly: docs/decisions/dependencies.md#one-http-client.
"""

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field

_MAX_HEAD_BYTES = 65_536
_MAX_CHUNK_BYTES = 256 * 1024 * 1024
_MAX_CHUNK_LINE_BYTES = 4096
_MAX_EVENT_BYTES = 16 * 1024 * 1024
_HEX_DIGITS = frozenset(string.hexdigits.encode())
_STATUS_LINE = re.compile(r"HTTP/1\.[^ ]* ([0-9]{3})(?: .*)?", re.DOTALL)


class ExchangeFailed(Exception):
    """The reply is missing or broken. `kind` is short and countable, the text is for a person."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole reply. The body is empty where it went to an event sink."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    """Keyed by name in lower case."""


class ReplyParser:
    """Bytes as they come in; head, then decoded pieces of the body. No input or output of its own."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.is_event_stream = False
        """Whether the body is events; the body of a refusal never is."""
        self._buffer = bytearray()
        self._left: int | None = None
        """Bytes left of the body or of the chunk; None for a body that ends with the connection."""
        self._is_chunked = False

    def feed(self, data: bytes) -> bytes:
        """Return what `data` adds to the body. Raises ExchangeFailed on bytes that are not HTTP."""
        self._buffer += data
        while not self.status:
            if not self._read_head():
                return b""
        return self._read_chunks() if self._is_chunked else self._read_plain()

    def end(self) -> None:
        """The connection is closed. Raises ExchangeFailed if that cut the reply off."""
        if self.status and not self._is_chunked and self._left is None:
            self.is_complete = True
        if not self.is_complete:
            said = "the reply broke off: the server closed the connection before the end"
            raise ExchangeFailed("connection closed", said)

    def _read_head(self) -> bool:
        """Return whether a whole head was there. One of status 1xx announces another, and is skipped."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise ExchangeFailed("not HTTP", "the reply has no end of its head")
            return False
        status_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        if (found := _STATUS_LINE.fullmatch(status_line)) is None:
            raise ExchangeFailed("not HTTP", f"the reply starts with {status_line[:60]!r}")
        status = int(found[1])
        if 100 <= status < 200:
            return True
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self.status = status
        is_stream = self.headers.get("content-type", "").startswith("text/event-stream")
        self.is_event_stream = is_stream and status == 200
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length", "")
        self._left = int(length) if length.isdecimal() and len(length) < 19 and not self._is_chunked else None
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
                    if len(self._buffer) > _MAX_CHUNK_LINE_BYTES:
                        raise ExchangeFailed("not HTTP", "a chunk has no end of its first line")
                    break
                self._left = self._chunk_size(bytes(self._buffer[:line_end]))
                del self._buffer[: line_end + 2]
                if self._left == 0:  # trailers may follow, which are not read
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
        digits = line.partition(b";")[0].strip()
        if not digits or not _HEX_DIGITS.issuperset(digits):  # int() would take signs and underscores
            raise ExchangeFailed("not HTTP", f"a chunk starts with {line[:20]!r}")
        size = int(digits, 16)
        if size > _MAX_CHUNK_BYTES:
            raise ExchangeFailed("reply too long", f"a chunk of {size} bytes")
        return size


class EventParser:
    """Pieces of an event stream; the data of whole events."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data of the events that `body` completes. Raises ExchangeFailed on one without end."""
        *events, self._buffer = (self._buffer + body).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._buffer) > _MAX_EVENT_BYTES:
            raise ExchangeFailed("reply too long", f"an event is longer than {_MAX_EVENT_BYTES} bytes")
        return [data for data in map(self._data_of, events) if data]

    @staticmethod
    def _data_of(event: bytes) -> bytes:
        lines = (line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))
        return b"\n".join(lines)
