"""Chunks to bytes on the wire, as server-sent events.

Owns: framing, the moment the reply starts, keep-alive comments, the error event, [DONE], and the patience
with a client that has stopped reading.
Source: the event stream format of the HTML standard, section 9.2; OpenAI's [DONE].
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.types import TokenOutput
from server.edge.error_replies import ErrorReply, reply_of
from server.edge.http.connections import WriteChunk, chunk_writer, cut_off, nothing_written
from server.edge.http.disconnect import while_connected
from server.edge.http.edge import Edge, NumberedOutputs
from server.edge.waiting_stream import STREAM_HEADERS
from server.reply.generate.replies import INLINE_PROMPT_LOGPROBS, StreamReply

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def data_event(payload: dict[str, Any]) -> bytes:
    # JSON has no raw line break, so that one line is enough.
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    return b"event: " + str(payload["type"]).encode() + b"\n" + data_event(payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """Payloads of a stream to bytes, and the bytes around them."""

    event: Callable[[dict[str, Any]], bytes]
    failed: Callable[[ErrorReply], Iterable[dict[str, Any]]]
    """The last payloads of a stream that has begun and cannot go on."""
    end: bytes = b""
    """Written after the last event, after a failure as well."""
    keep_alive: bytes = KEEP_ALIVE
    """Written in a silence; empty if the protocol has nothing that clients skip."""
    media_type: str = "text/event-stream"

    def events(self, payloads: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(map(self.event, payloads))


CHUNKS = Framing(event=data_event, failed=lambda error: [error.body()], end=DONE)
"""OpenAI's older endpoints: events without names. Clients raise on one that has an `error`."""


class SlowClient(ClientDisconnect):
    """The client is still there, but its socket has been full for too long."""


class StreamedResponse(Response):
    """A response in pieces. Starts with the first of them, so that a refusal still gets its own status.

    A request that waits longer than the keep-alive interval is started by a comment; errors from
    then on become an error event.
    """

    def __init__(self, edge: Edge, framing: Framing) -> None:
        # Response.__init__ would declare an empty body and its length.
        self.status_code = 200
        self.media_type = framing.media_type
        self.background = None
        self.init_headers(STREAM_HEADERS)
        self._framing = framing
        self._patience = edge.patience
        self._slow_client_aborts = edge.metrics.slow_client_aborts
        self._count_error = edge.metrics.count_error
        self._sending = asyncio.Lock()
        self._has_started = False
        self._is_refused = False
        self._last_sent_s = 0.0
        self._write_chunk: WriteChunk = nothing_written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write_chunk = chunk_writer(scope)
        keeping_alive = asyncio.create_task(self._keep_alive(send))
        try:
            await while_connected(receive, self._write(scope, send))
        except SlowClient:
            self._slow_client_aborts.inc()
            await cut_off(scope, receive)
        except ClientDisconnect:
            if not self._has_started:
                raise
        finally:
            keeping_alive.cancel()
            await asyncio.gather(keeping_alive, return_exceptions=True)

    async def _write(self, scope: Scope, send: Send) -> None:
        try:
            last = await self._pass_on(send)
        except SlowClient:
            raise
        except Exception as error:
            if not self._has_started:
                self._is_refused = True
                raise
            # The status line is gone.
            failure = self._framing.failed(reply_of(error, scope, self._count_error))
            last = self._framing.events(failure)
        await self._send(send, last + self._framing.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(self, send: Send) -> bytes:
        """Send everything but the last events, and return these."""
        raise NotImplementedError

    def _sent_at_once(self, body: bytes) -> bool:
        """Write a chunk without waiting; False if another one is before it, or the socket is full."""
        if not self._has_started or self._sending.locked() or not self._write_chunk(body):
            return False
        self._last_sent_s = asyncio.get_running_loop().time()
        return True

    async def _send(self, send: Send, body: bytes) -> None:
        async with self._sending:
            try:
                async with asyncio.timeout(self._patience.send_timeout_s):
                    if not self._has_started:
                        self._has_started = True
                        headers = self.raw_headers
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                raise SlowClient from None
            self._last_sent_s = asyncio.get_running_loop().time()

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment in every silence, until a send takes too long; the next chunk will then fail too."""
        if self._patience.keep_alive_s <= 0 or not self._framing.keep_alive:
            return
        clock = asyncio.get_running_loop().time
        self._last_sent_s = clock()
        while not self._is_refused:  # a comment now would take the refusal its status
            silence_s = clock() - self._last_sent_s
            if silence_s >= self._patience.keep_alive_s:
                await self._send(send, self._framing.keep_alive)
            else:
                await asyncio.sleep(self._patience.keep_alive_s - silence_s)


class EventStream(StreamedResponse):
    def __init__(
        self,
        outputs: NumberedOutputs,
        reply: StreamReply,
        edge: Edge,
        *,
        framing: Framing = CHUNKS,
    ) -> None:
        super().__init__(edge, framing)
        self._outputs = outputs
        self._reply = reply

    async def _pass_on(self, send: Send) -> bytes:
        async with aclosing(self._outputs) as outputs:
            async for prompt_index, output in outputs:
                if len(output.prompt_logprobs) > INLINE_PROMPT_LOGPROBS:
                    body = await asyncio.to_thread(self._events, prompt_index, output)
                else:
                    body = self._events(prompt_index, output)
                if body and not self._sent_at_once(body):
                    await self._send(send, body)
        return self._framing.events(self._reply.finish())

    def _events(self, prompt_index: int, output: TokenOutput) -> bytes:
        chunks = self._reply.update(prompt_index, output)
        return self._framing.events(chunks) if chunks else b""
