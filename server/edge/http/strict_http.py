"""HTTP/1.1 without the leniencies that two readers may take differently.

Owns: the refusals of heads that h11 takes: lines that end without CR, folded fields, versions other than 1.x,
and more than 64 KiB, which h11 sees only in heads that have not come to their end.

A server behind a proxy must not see another request than the proxy does. Source: RFC 9112, sections 2.2, 2.3
and 5.2.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import h11

_LOOSE_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")

_PLAIN_HEAD = re.compile(
    rb"([A-Z]+) (/[!-~]*) HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*\r\n)+)\r\n"
)
_LENGTH = b"content-length"
_MAX_DIGITS = 15
_MAX_HEAD_BYTES = 64 * 1024


class Head(Protocol):
    """Head of a request, from either parser; names of fields are in lower case."""

    @property
    def method(self) -> bytes: ...
    @property
    def target(self) -> bytes: ...
    @property
    def headers(self) -> Iterable[tuple[bytes, bytes]]: ...


class PlainHead(NamedTuple):
    """Head of a plain HTTP/1.1 request that every parser reads alike."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    num_bytes: int
    """Bytes of the whole request, its body included."""


def plain_head(seen: bytes) -> PlainHead | None:
    """Parse the head with which these bytes begin; None where it takes a full parser to judge it."""
    found = _PLAIN_HEAD.match(seen)
    if found is None:
        return None
    headers = []
    for line in found[3].split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        headers.append((name.lower(), value.strip(b" \t")))
    names = [name for name, _ in headers]
    if names.count(b"host") != 1 or names.count(_LENGTH) > 1 or b"transfer-encoding" in names:
        return None
    length = next((value for name, value in headers if name == _LENGTH), b"0")
    if not length.isdigit() or len(length) > _MAX_DIGITS:
        return None
    return PlainHead(found[1], found[2], headers, found.end() + int(length))


RefusalOf = Callable[[h11.Request], bytes | None]
"""Makes the whole reply to a head that is refused; None: it is a request."""


class RefusedHead(h11.RemoteProtocolError):
    """A head that is HTTP, and refused with the reply that this carries."""

    def __init__(self, reply: bytes, *, num_body_bytes: float) -> None:
        """`num_body_bytes` are declared by the head; infinity if it does not say."""
        super().__init__("refused")
        self.reply = reply
        self.num_body_bytes = num_body_bytes


class StrictConnection(h11.Connection):
    """The reader and writer of one connection."""

    refusal_of: RefusalOf | None = None
    """Function that may refuse a head; None: no head is refused."""

    def next_event(self) -> Any:
        """Parse the next event. Raises h11.RemoteProtocolError, as the base class does, or RefusedHead."""
        if self.their_state is not h11.IDLE:
            return super().next_event()
        before = self.trailing_data[0]
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check(before[: len(before) - len(self.trailing_data[0])], event)
            reply = self.refusal_of(event) if self.refusal_of is not None else None
            if reply is not None:
                declared = (int(value) for key, value in event.headers if key == _LENGTH)
                raise RefusedHead(reply, num_body_bytes=next(declared, math.inf))
        return event


def _check(head: bytes, request: h11.Request) -> None:
    if len(head) > _MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
    if _LOOSE_LINE.search(head):
        raise h11.RemoteProtocolError("a line of the head ends without CR, or goes on in the next")
    if not request.http_version.startswith(b"1."):
        raise h11.RemoteProtocolError("this is not HTTP/1")
