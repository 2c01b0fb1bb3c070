"""An endpoint of the API: its routes, and all that other parts of the server must know about them.

Owns: the record that each endpoint brings, and the helpers with which it documents its routes. Routes read
their bodies themselves, for the sake of speed and of our own error replies, so FastAPI cannot see the models.
Nor is it given those of replies, of which it would make validators at each start.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, RootModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.edge.error_replies import ErrorShape
from server.edge.http.edge import EdgeSettings

MODEL_REFERENCE = "#/components/schemas/{model}"
NO_STORE = {"cache-control": "no-store"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Routes that one line of server/endpoints.py registers; log, document and counters follow from it."""

    router: APIRouter
    requests: Mapping[type[BaseModel], Collection[str]] = field(default_factory=dict)
    """Models of the bodies, each with the names of the fields that are refused."""
    events: tuple[type[BaseModel], ...] = ()
    """Models of stream events that are no whole replies."""
    open_paths: frozenset[str] = frozenset()
    """Paths that are served without a key, for probes and scrapers: logged at DEBUG, not traced."""
    keyless_paths: frozenset[str] = frozenset()
    """Paths that are served without a key, and are no probes: they have no place in the reserve."""
    batch_paths: frozenset[str] = frozenset()
    """Paths that a line of a batch file may name."""
    operations: Mapping[str, str] = field(default_factory=dict)
    """Path to OpenTelemetry's `gen_ai.operation.name`, which its spans carry."""

    error_shapes: Mapping[str, ErrorShape] = field(default_factory=dict)
    """Beginning of paths to the shape of errors below it, where that is not OpenAI's."""

    event_shapes: Mapping[str, ErrorShape] = field(default_factory=dict)
    """The same for errors that are events of a stream, where these differ."""

    add_state: Callable[[FastAPI, EdgeSettings], None] = lambda app, settings: None  # noqa: ARG005
    """Puts the objects that only its routes use into the state of the application."""

    @property
    def paths(self) -> frozenset[str]:
        """Names of the routes in logs and metrics: `/v1/models/{model}`."""
        return frozenset(path for path, _ in self.methods)

    @property
    def methods(self) -> list[tuple[str, str]]:
        """Paths with each of their methods."""
        routes = [route for route in self.router.routes if isinstance(route, APIRoute)]
        return [(route.path_format, method) for route in routes for method in route.methods or ()]


class DirectCalls:
    """ASGI middleware, inside of all layers: calls operations past the router, a tenth of their cost."""

    def __init__(self, app: ASGIApp, *, endpoints: Iterable[Endpoint]) -> None:
        self._app = app
        self._functions = {
            route.path: route.endpoint
            for each in endpoints
            for route in each.router.routes
            if isinstance(route, APIRoute) and route.path in each.operations
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        function = self._functions.get(scope["path"]) if scope["method"] == "POST" else None
        if function is None:
            await self._app(scope, receive, send)
            return
        response = await function(Request(scope, receive, send))
        await response(scope, receive, send)


class ReplyModel(BaseModel):
    """The shape of a reply, for the document only. Replies are built as plain dicts, token by token."""

    model_config = ConfigDict(extra="forbid", defer_build=True)  # few servers are asked for the document


class ReplyList(RootModel[list[Any]]):
    """The shape of a reply that is a list, for the document only."""


class ReplyPage(ReplyModel):
    """The shape of a part of a list, as OpenAI pages it."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ErrorDetail(ReplyModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReplyBody(ReplyModel):
    error: ErrorDetail


def reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": MODEL_REFERENCE.format(model=model.__name__)}


def in_json(model: type[BaseModel]) -> dict[str, Any]:
    """The content of a reply, by its media type."""
    return {"application/json": {"schema": reference(model)}}


def _errors_as(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Errors in the shape of a model, by status."""
    return {
        "4XX": {"content": in_json(model), "description": "The caller's mistake, or too much work (429)."},
        "5XX": {"content": in_json(model), "description": "The server's failure, or not ready (503)."},
    }


ERRORS = _errors_as(ErrorReplyBody)
_STREAM_NOTE = (
    "With `stream`: server-sent events, each `data: ` and a chunk; comments keep the connection alive;"
    ' a failure under way is an event `{"error": ...}`; the last event is `data: [DONE]`.'
)


def json_reply(body: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), headers=headers, media_type="application/json")


def page_body(shown: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": has_more,
    }


def documentation(
    model: type[BaseModel],
    *,
    request: type[BaseModel] | None = None,
    chunk: type[BaseModel] | None = None,
    query: Mapping[str, dict[str, Any]] | None = None,
    errors: type[BaseModel] = ErrorReplyBody,
) -> dict[str, Any]:
    """Keyword arguments for the decorator of a route; `query` are schemas by name."""
    success: dict[str, Any] = {"content": in_json(model), "description": "Success."}
    if chunk is not None:
        success["description"] = _STREAM_NOTE
        success["content"]["text/event-stream"] = {"schema": _event(chunk)}
    found: dict[str, Any] = {"responses": {200: success, **_errors_as(errors)}}
    if request is not None:
        found["openapi_extra"] = {"requestBody": {"required": True, "content": in_json(request)}}
    if query is not None:
        found["openapi_extra"] = {"parameters": _in_query(query)}
    return found


def add_named_events(found: dict[str, Any], event: type[BaseModel], note: str) -> None:
    """Add to the documentation of a route that its reply may be a stream of events with names."""
    payload = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": reference(event),
    }
    properties = {"event": {"type": "string"}, "data": payload}
    schema = {"type": "object", "required": ["event", "data"], "properties": properties}
    success = found["responses"][200]
    success["description"] = f"With `stream`: server-sent events whose names are their types, {note}"
    success["content"]["text/event-stream"] = {"schema": schema}


def documentation_of_one(
    model: type[BaseModel], parameter: str, *, query: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Keyword arguments for a route whose path has a parameter; `query` are schemas by name."""
    place = {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
    return {**documentation(model), "openapi_extra": {"parameters": [place, *_in_query(query or {})]}}


def _in_query(query: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """One server-sent event, as OpenAPI 3.2 describes it: an object of its fields, `data` being a string."""
    json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"oneOf": [reference(chunk), reference(ErrorReplyBody)]},
    }
    data = {"oneOf": [{"const": "[DONE]"}, json]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}
