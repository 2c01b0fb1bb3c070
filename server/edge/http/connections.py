"""Connections of clients: their number, the time for a head, bytes that are not HTTP.

Owns: decisions before a request exists, or after its reply was made: the time for a head, the
number of connections, the end of a connection whose client does not read, or whose server leaves.

A place is either one of many or, when those are taken, one of a few in reserve. The reserve answers probes
and scrapers, refuses all other requests with a reason, and is given back after one reply.
"""

import asyncio
import logging
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, cast

import h11
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from engine.errors import RequestRejected
from engine.logs.lines import fields
from engine.logs.rare_log import RareLog
from engine.types import EngineState, Health
from server.edge.error_replies import HeadTimeout, HeadTooLarge, TooManyConnections, describe, error_response
from server.edge.http.edge import Edge
from server.edge.http.strict_http import RefusalOf, RefusedHead, StrictConnection
from server.edge.observe.request_ids import new_request_id
from server.edge.sockets.lingering_close import LingeringTransport
from server.edge.sockets.peer_probe import HalfClosed, can_watch, let_kernel_ask
from server.edge.sockets.places import Place

log = logging.getLogger(__name__)

RESERVED_HEAD_TIMEOUT_S = 2.0
"""A reserve that silent clients could hold for long would be none."""
_PROCESSING = 102
_HEAD_TOO_LARGE = 431
_MAX_HEAD_BYTES = 16 * 1024
"""Bytes of a head, where the configuration names no other limit."""
_READ_BYTES = 64 * 1024
"""Bytes read at once. asyncio's 256 KiB are a block that the system maps, and clears, for each read
(startup/allocator.py): 30 us of a request."""
_HANG_UP = (b"connection", b"close")
_IS_RESERVED = "tokenyard.is_reserved"
_CUT_OFF = "tokenyard.cut_off"
_WRITE_CHUNK = "tokenyard.write_chunk"

_base_log = logging.getLogger(f"{__name__}.uvicorn")
"""Logger of the base class, which has a warning for each head that is no HTTP: our own line says more."""
_base_log.setLevel(logging.ERROR)
_too_many = RareLog(log, logging.WARNING, "every place for a connection is taken: %d refused")

WriteChunk = Callable[[bytes], bool]
"""Takes no empty piece, which would end the body. False: nothing was written, the client's socket is full or
gone; then `send` waits, or ends."""


class ClientConnection(H11Protocol):
    """uvicorn's HTTP/1.1 with time limits, and with refusals in OpenAI's shape."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        place: Place | None,
    ) -> None:
        """Without a place, refuse."""
        super().__init__(config, server_state, app_state)
        self.logger = _base_log
        self.conn = StrictConnection(h11.SERVER, config.h11_max_incomplete_event_size or _MAX_HEAD_BYTES)
        self._place = place
        self._half_closed: HalfClosed | None = None
        self._has_heard_all = False
        edge: Edge = cast(FastAPI, config.app).state.edge
        self._refusal_of: RefusalOf = cast(FastAPI, config.app).state.full_queue.refusal_of
        self._patience = edge.patience
        self._refused = edge.metrics.refused_connections
        self._head_timeout_s = edge.patience.head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, or be refused. The signature is that of the base class."""
        if hasattr(transport, "max_size"):
            transport.max_size = _READ_BYTES
        self._ending = LingeringTransport(transport, may_hear_more=self._may_hear_more)
        super().connection_made(cast(asyncio.Transport, self._ending))
        if self._place is None:
            self._refused.inc()
            self._refuse(TooManyConnections())
            return
        self._place.give_way = self._give_way
        if self._place.is_reserved:
            self._head_timeout_s = min(self._head_timeout_s, RESERVED_HEAD_TIMEOUT_S)
        # Copied by uvicorn into the scope of every request.
        self.app_state = {
            **self.app_state,
            _IS_RESERVED: self._place.is_reserved,
            _CUT_OFF: self._reset,
            _WRITE_CHUNK: self._write_chunk,
        }
        self._start_head_timer()
        if self.scheme == "http" and not self._place.is_reserved:  # a handshake costs more than is saved
            cast(StrictConnection, self.conn).refusal_of = self._refusal_of

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._half_closed is not None:
            self._half_closed.stop()
        if self._place is not None:
            self._place.leave()
        super().connection_lost(exc)
        self._drop_references()

    def _drop_references(self) -> None:
        """Forget all that refers to this connection: it is freed with the last request that uses it.

        In a cycle it would stay, with its request, until Python's next full collection, which comes after
        thousands of connections. Their memory would lie between that of others, and could not be returned.
        """
        self._half_closed = None
        self._unset_keepalive_if_required()  # the base class leaves it where the end was a reset
        self._ending.forget_connection()
        self.app_state = {}
        self.scope = self.cycle = None  # type: ignore[assignment]  # as before its first request

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True, to go on, if the client may be waiting for a reply: it has closed its half."""
        if not self._is_answering or self.cycle.more_body or not self._ending.can_write_eof():
            return False
        if self._half_closed is None:
            client = self.transport.get_extra_info("socket")
            if not can_watch(client):
                return False
            self._half_closed = HalfClosed(
                client,
                ask=self._write_interim,
                num_writes=lambda: self._ending.num_writes,
                on_left=self.transport.abort,
            )
        return True

    def data_received(self, data: bytes) -> None:
        """Take in bytes. The time for a head is not renewed by them: a trickle must not hold a place."""
        if self._ending.is_lingering:
            return
        try:
            super().data_received(data)
        except MemoryError as error:
            self._refuse(error)
        if self._is_answering or self.transport.is_closing():
            self._stop_head_timer()
            if self._place is not None:
                self._place.busy()
            # On a connection that is kept, an end would cost more than the layers.
            cast(StrictConnection, self.conn).refusal_of = None
        elif self._head_timer is None:  # the idle timer of a kept connection ends with the first byte
            self._start_head_timer()

    def on_response_complete(self) -> None:
        if self._place is not None:
            self._place.quiet()
        super().on_response_complete()
        if self._is_answering:  # the next request was here already
            if self._place is not None:
                self._place.busy()
        elif self._half_closed is not None:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 -- the base class's hook and words
        """Answer bytes that cannot be parsed. Called where the parser's error is handled."""
        error = sys.exception()
        if isinstance(error, RefusedHead):
            self._stop_head_timer()
            self._has_heard_all = len(self.conn.trailing_data[0]) >= error.num_body_bytes
            self.transport.write(error.reply)
            self.transport.close()
        elif isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == _HEAD_TOO_LARGE:
            self._refuse(HeadTooLarge("the request line and the headers are larger than 64 KiB together"))
        else:
            text = "this is not HTTP/1.1 as this server speaks it"
            self._refuse(RequestRejected(text, code="invalid_request"))
        if error is not None:
            # h11 raises it in one of its own methods: that frame holds it, and its traceback this connection.
            error.__traceback__ = None

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _may_hear_more(self) -> bool:
        """True if the client may send more bytes; False on an idle connection."""
        if self._place is None or self._half_closed is not None or self._has_heard_all:
            return False  # the first would hold a descriptor beyond all places, the others have said all
        return self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._give_up_on_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up_on_head(self) -> None:
        self._head_timer = None
        has_begun = bool(self.conn.trailing_data[0])
        if has_begun:
            self._refuse(HeadTimeout(f"no complete head of a request after {self._head_timeout_s:g} s"))
        else:
            self.transport.close()

    def _give_way(self) -> None:
        """End a connection without a request under way, so that a new one has its place."""
        self._refused.inc()
        self.transport.abort()

    def _reset(self) -> None:
        # Without this the kernel would go on offering what it has taken over to a client that does not read.
        at_once = struct.pack("ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.transport.abort()

    def _write_chunk(self, data: bytes) -> bool:
        """See `chunk_writer`. Framed as h11 would: the chunked transfer coding, RFC 9112, section 7.1."""
        cycle = self.cycle
        if cycle is None or cycle.disconnected:  # the client is gone
            return False
        if self.conn.our_state is not h11.SEND_BODY or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _write_interim(self) -> bool:
        """Write a head that means nothing, or let the kernel ask where none is known: see `HalfClosed`."""
        if self.conn.our_state is not h11.SEND_RESPONSE:
            return False
        if self.conn.their_http_version != b"1.1":
            let_kernel_ask(self.transport.get_extra_info("socket"))
            return True
        interim = h11.InformationalResponse(status_code=_PROCESSING, headers=[], reason=b"Processing")
        self.transport.write(self.conn.send(interim) or b"")
        return True

    def _refuse(self, error: Exception) -> None:
        """Send an error reply where one can still begin, and close the connection."""
        self._stop_head_timer()
        if self.cycle is not None:  # a request under way is over: it must not write into this reply
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            self.transport.write(self._refusal(error))
        self.transport.close()

    def _refusal(self, error: Exception) -> bytes:
        request_id = new_request_id()
        reply = describe(error, request_id)
        if isinstance(error, TooManyConnections):
            _too_many.note()
        else:
            facts = fields(request_id=request_id, error=reply.code, status=reply.status)
            log.info("refused what is no request yet", extra=facts)
        response = error_response(reply)
        headers = [header for header in response.raw_headers if header[0] != _HANG_UP[0]]
        headers += [(b"x-request-id", request_id.encode()), _HANG_UP]
        status = response.status_code
        parts = (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        )
        return b"".join(self.conn.send(part) or b"" for part in parts)


class ReservedPlaces:
    """ASGI middleware: on a connection from the reserve, open paths only."""

    def __init__(self, app: ASGIApp, *, open_paths: frozenset[str]) -> None:
        self._app = app
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_reserved(scope) and scope["path"] not in self._open_paths:
            raise TooManyConnections
        await self._app(scope, receive, send)


class LastReplies:
    """ASGI middleware: while the server leaves, and on places of the reserve, a reply ends its connection.

    The client's next request finds a server that stays, also through a load balancer that pins connections,
    before this one refuses any. Must stand outside of the layer that makes replies of errors.
    """

    def __init__(self, app: ASGIApp, *, health: Callable[[], Health]) -> None:
        self._app = app
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def last_send(message: Message) -> None:
            if message["type"] == "http.response.start" and (
                _is_reserved(scope) or self._health().state is EngineState.DRAINING
            ):
                headers = [field for field in message.get("headers", ()) if field[0] != _HANG_UP[0]]
                message = {**message, "headers": [*headers, _HANG_UP]}
            await send(message)

        await self._app(scope, receive, last_send)


def _is_reserved(scope: Scope) -> bool:
    return bool(scope.get("state", {}).get(_IS_RESERVED))


def chunk_writer(scope: Scope) -> WriteChunk:
    """A function that writes a piece of a streamed body past all layers, once the reply has begun.

    No layer reads such a piece, and passing them costs more than writing. It writes nothing if a body
    is not sent in chunks, or under a server other than ours.
    """
    if scope.get("http_version") != "1.1":
        return nothing_written
    write: WriteChunk = scope.get("state", {}).get(_WRITE_CHUNK, nothing_written)
    return write


def nothing_written(_: bytes) -> bool:
    return False


async def cut_off(scope: Scope, receive: Receive) -> None:
    """End the connection of this request now, dropping bytes that the client has not read.

    Closing it would wait for the client. Nothing happens under a server other than ours.
    """
    reset = scope.get("state", {}).get(_CUT_OFF)
    if reset is not None:
        reset()
        while (await receive())["type"] != "http.disconnect":
            pass
