"""Streams that begin while their model is being loaded.

Owns: the comments that say how far it is, and the last event of a request that fails behind them.
Never: waits for a model (served_models.py).
"""

import asyncio
from collections.abc import Callable
from typing import cast

import orjson
from starlette.types import Message, Scope, Send

from engine.types import Health
from server.edge.error_replies import ErrorShape, describe, log_failure, noted
from server.edge.observe.request_ids import note_error, request_id_of

_WAITING = "tokenyard.waiting"
_EVERY_S = 5.0
"""Time between two comments; a refusal that comes earlier than the first has a status of its own."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


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
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": f": {text}\n\n".encode(), "more_body": True})

    async def fail(self, error: Exception, count: Callable[[str], None], shape: ErrorShape) -> None:
        """End a reply that has begun with an error as its event; `count` is called with its code."""
        reply = describe(error, request_id_of(self._scope))
        log_failure(error, reply, request_id_of(self._scope))
        note_error(self._scope, noted(reply))
        count(reply.code)
        body = b"event: error\ndata: " + orjson.dumps(shape(reply)) + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


async def comment_on_load(scope: Scope, health_of: Callable[[], Health], silence_s: float) -> None:
    """Say how far the model is, until this is cancelled. `silence_s` 0: silences are not broken."""
    while silence_s:
        await asyncio.sleep(min(_EVERY_S, silence_s))
        health = health_of()
        await cast(WaitingStream, scope[_WAITING]).comment(f"{health.detail}, {health.progress:.0%}")
