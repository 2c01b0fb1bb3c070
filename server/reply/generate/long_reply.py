"""A whole reply in pieces, so that no turn of the event loop is long for it.

Owns: the order and the size of its parts. Never: their contents.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.edge.http.connections import cut_off

SENT_AT_ONCE = 256 * 1024
"""Bytes of a reply that are sent in one turn of the event loop."""
_JSON = "application/json"


def reply_of(pieces: Sequence[bytes], headers: Mapping[str, str] | None = None) -> Response:
    """Return the reply of JSON whose body is these pieces, one behind the other."""
    num_bytes = sum(map(len, pieces))
    if num_bytes <= SENT_AT_ONCE:
        return Response(b"".join(pieces), headers=headers, media_type=_JSON)
    return LongReply(_each(pieces), num_bytes, headers)


async def _each(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


class LongReply(Response):
    """A reply that is sent part by part, with a turn of the event loop after each.

    A socket takes tens of MiB in one call, which would hold the event loop for all that time; and so would
    a copy of all pieces into one.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        num_bytes: int,
        headers: Mapping[str, str] | None = None,
        *,
        media_type: str = _JSON,
    ) -> None:
        """`num_bytes`: of all pieces together; with fewer, as of a file that was deleted, it is cut off."""
        super().__init__(headers={**(headers or {}), "content-length": str(num_bytes)}, media_type=media_type)
        self._pieces, self._num_left = pieces, num_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in _parts(self._pieces):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self._num_left -= len(part)
            await asyncio.sleep(0)
        if self._num_left:
            await cut_off(scope, receive)
            return
        await send({"type": "http.response.body", "body": b""})


async def _parts(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Divide the pieces into parts of SENT_AT_ONCE bytes, one for each turn of the event loop."""
    gathered = bytearray()
    async for piece in pieces:
        for start in range(0, len(piece), SENT_AT_ONCE):
            gathered += piece[start : start + SENT_AT_ONCE]
            while len(gathered) >= SENT_AT_ONCE:
                yield bytes(gathered[:SENT_AT_ONCE])
                del gathered[:SENT_AT_ONCE]
    if gathered:
        yield bytes(gathered)
