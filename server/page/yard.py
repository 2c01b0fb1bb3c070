"""GET /admin/events and /admin/server: what the page's live view and `tokenyard top` read.

Never: changes anything, or shows a prompt, a reply or a key.

With keys it takes one that may administer; app.py says where it is served without keys.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Literal

import orjson
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from engine.errors import EngineUnavailable
from engine.types import ModelInfo
from engine.version import VERSION
from server.edge.http.edge import Edge, EdgeSettings
from server.edge.http.endpoint import ERRORS, Endpoint, ReplyModel, documentation
from server.edge.http.served_models import choose_by_query
from server.reply.generate.sse import CHUNKS, StreamedResponse

_ALIVE = b": alive\n\n"
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
    bytes_by_group: dict[str, int]
    """Size of what a request of full length keeps, by groups of layers."""
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
    param: str
    message: str
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
_FRAMING = replace(CHUNKS, keep_alive=b"", end=b"")  # the engine breaks each silence


class _Views(StreamedResponse):
    """Views as server-sent events, as fast as the client reads; a client that stops reading is cut off."""

    def __init__(self, views: AsyncGenerator[bytes, None], edge: Edge) -> None:
        super().__init__(edge, _FRAMING)
        self._views = views

    async def _pass_on(self, send: Send) -> bytes:
        async with aclosing(self._views) as views:
            async for view in views:
                await self._send(send, b"data: " + view + b"\n\n" if view else _ALIVE)
        return b""


@router.get("/admin/events", **_EVENTS)
async def stream_views(request: Request) -> Response:
    """Steps, lines and blocks as they change, until the client leaves."""
    edge = choose_by_query(request)
    return _Views(edge.engine.watch(), edge)


@router.get("/admin/server", **documentation(ServerFacts))
async def show_server(request: Request) -> Response:
    """The served model, every option with its origin, and the last errors."""
    edge = choose_by_query(request)
    health = edge.engine.health()
    options: Mapping[str, Mapping[str, Any]] = request.app.state.shown_options
    body = {
        "version": VERSION,
        "state": health.state.value,
        "detail": health.detail,
        "model": None,
        "options": options,
        "errors": [error._asdict() for error in edge.metrics.recent_errors],
    }
    with suppress(EngineUnavailable):  # it was never loaded
        body["model"] = _model(edge.engine.info)
    return Response(orjson.dumps(body, default=str), media_type="application/json")


def _model(info: ModelInfo) -> dict[str, Any]:
    shown = ServedModelFacts.model_fields.keys() - {"name"}
    return {"name": info.served_names[0], **{name: getattr(info, name) for name in shown}}
