"""Streams that begin while their model is being loaded.

Owns: the comments that say how far it is, and the last event of a request that fails behind them.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Message, Scope, Send

from engine.types import Health
from server.edge.error_replies import ErrorShape, reply_of

_WAITING = "tokenyard.waiting"
_EVERY_S = 5.0
"""Time between two comments; a refusal that comes earlier than the first has a status of its own."""
STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the events otherwise
}
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", **STREAM_HEADERS}


class WaitingStream:
    """The reply of one request, which may begin before its route answers."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.has_begun = False
        scope[_WAITING] = self

    async def send(self, message: Message) -> None:
        """Pass on a message of the route; a reply that has begun does not begin again."""
        if not (self.has_begun and message["type"] == "http.response.start"):
            await self._send(message)

    async def comment(self, text: str) -> None:
        if not self.has_begun:
            self.has_begun = True
            headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": f": {text}\n\n".encode(), "more_body": True})

    async def fail(self, error: Exception, count: Callable[[str], None], shape: ErrorShape) -> None:
        """End a reply that has begun with an error as its event; `count` is called with its code."""
        reply = reply_of(error, self._scope, count)
        if isinstance(error, ClientDisconnect):  # it is read no more
            return
        body = b"event: error\ndata: " + orjson.dumps(shape(reply)) + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


async def comment_on_load(scope: Scope, health_of: Callable[[], Health], silence_s: float) -> None:
    """Say how far the model is, until this is cancelled. `silence_s` 0: silences are not broken."""
    while silence_s:
        await asyncio.sleep(min(_EVERY_S, silence_s))
        health = health_of()
        await cast(WaitingStream, scope[_WAITING]).comment(f"{health.detail}, {health.progress:.0%}")
