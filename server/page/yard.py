"""GET /admin/events and /admin/server: what the page's live view and `tokenyard top` read.

Owns: the stream of views, and the facts of the server with the origin of its options.
Never: changes anything, or shows a prompt, a reply or a key.

With keys it takes one that may administer; app.py says where it is served without keys.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Literal

import orjson
from fastapi import APIRouter, FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import EngineUnavailable
from engine.types import ModelInfo
from engine.version import VERSION
from server.edge.http.connections import cut_off
from server.edge.http.disconnect import while_connected
from server.edge.http.edge import EdgeSettings, edge_of
from server.edge.http.endpoint import ERRORS, Endpoint, ReplyModel, documentation

_ALIVE = b": alive\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_EVENTS: dict[str, Any] = {
    "responses": {
        200: {
            "description": (
                "Server-sent events, ten a second at most, each a JSON object: the steps since the last one "
                "(as --trace-steps writes them), the running and the waiting line, and runs of blocks as "
                "[number, use, sequence], use being 0 free, 1 cached, 2 of one sequence, 3 shared. Events "
                "that a slow reader has not taken are dropped; `view` counts all of them."
            ),
            "content": {"text/event-stream": {"schema": {"type": "object"}}},
        },
        **ERRORS,
    }
}


class ServedModelFacts(ReplyModel):
    name: str
    model_type: str
    device: str
    dtype: str
    num_parameters: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    has_chat_template: bool


class OptionRow(ReplyModel):
    value: Any
    shown: str
    origin: str


class ErrorRow(ReplyModel):
    time_s: float
    method: str
    route: str
    status: int
    code: str
    request_id: str


class ServerFacts(ReplyModel):
    version: str
    state: Literal["loading", "ready", "draining", "dead"]
    detail: str
    model: ServedModelFacts | None
    """null while it is loading."""
    options: dict[str, OptionRow]
    errors: list[ErrorRow]
    """The last error replies, oldest first."""


def _keep_options(app: FastAPI, settings: EdgeSettings) -> None:
    app.state.shown_options = settings.shown_options


router = APIRouter()
ENDPOINT = Endpoint(router=router, add_state=_keep_options)


class ViewStream(Response):
    """Views as server-sent events, as fast as the client reads; a client that stops reading is cut off."""

    media_type = "text/event-stream"

    def __init__(self, views: AsyncGenerator[bytes, None], first: bytes, *, send_timeout_s: float) -> None:
        # Response.__init__ would declare an empty body and its length.
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._views = views
        self._first = first
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except TimeoutError:
            await cut_off(scope, receive)
        except ClientDisconnect:
            pass

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._views) as views:
            await self._send(send, self._first)
            async for view in views:
                await self._send(send, view)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, view: bytes) -> None:
        event = b"data: " + view + b"\n\n" if view else _ALIVE
        async with asyncio.timeout(self._send_timeout_s):
            await send({"type": "http.response.body", "body": event, "more_body": True})


@router.get("/admin/events", **_EVENTS)
async def stream_views(request: Request) -> Response:
    """Steps, lines and blocks as they change, until the client leaves."""
    edge = edge_of(request)
    views = edge.engine.watch()
    first = await anext(views, b"")  # a refusal still gets its own status
    return ViewStream(views, first, send_timeout_s=edge.patience.send_timeout_s)


@router.get("/admin/server", **documentation(ServerFacts))
async def show_server(request: Request) -> Response:
    """The served model, every option with its origin, and the last errors."""
    edge = edge_of(request)
    health = edge.engine.health()
    options: Mapping[str, Mapping[str, Any]] = request.app.state.shown_options
    body = {
        "version": VERSION,
        "state": health.state.value,
        "detail": health.detail,
        "model": _model(edge.engine.info) if _is_loaded(request) else None,
        "options": options,
        "errors": [error._asdict() for error in edge.metrics.recent_errors],
    }
    return Response(orjson.dumps(body, default=str), media_type="application/json")


def _is_loaded(request: Request) -> bool:
    try:
        return bool(edge_of(request).engine.info.served_names)
    except EngineUnavailable:
        return False


def _model(info: ModelInfo) -> dict[str, Any]:
    return {
        "name": info.served_names[0],
        "model_type": info.model_type,
        "device": info.device,
        "dtype": info.dtype,
        "num_parameters": info.num_parameters,
        "max_model_len": info.max_model_len,
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "kv_cache_bytes": info.kv_cache_bytes,
        "has_chat_template": info.has_chat_template,
    }
