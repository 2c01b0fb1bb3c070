"""HTTP/1.1 without the leniencies that two readers may take differently.

Owns: the refusals of heads that h11 takes: lines that end without CR, folded fields, versions other than 1.x.
Never: the words of a reply (connections.py), or fields by their names.

A server behind a proxy must not see another request than the proxy does. Source: RFC 9112, sections 2.2, 2.3
and 5.2.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import h11

_LOOSE_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")

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
                raise RefusedHead(reply, num_body_bytes=_declared_bytes(event))
        return event


def _check(head: bytes, request: h11.Request) -> None:
    if _LOOSE_LINE.search(head):
        raise h11.RemoteProtocolError("a line of the head ends without CR, or goes on in the next")
    if not request.http_version.startswith(b"1."):
        raise h11.RemoteProtocolError("this is not HTTP/1")


def _declared_bytes(request: h11.Request) -> float:
    return next((int(value) for key, value in request.headers if key == b"content-length"), math.inf)
