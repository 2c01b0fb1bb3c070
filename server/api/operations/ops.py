"""GET /health, /ping, /load, /version and /metrics, for machines, and POST /invocations, for SageMaker.

Owns: the probes' status codes, the cached metrics page, and the endpoint that a body's fields choose.
Never: a judgement of health, which follows from the engine's step counter.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal, Protocol

from fastapi import APIRouter, FastAPI
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestRejected
from engine.models.joined_metrics import JoinedRegistry
from engine.version import VERSION
from server.api.chat.chat import create_chat_completion
from server.api.completions.completions import create_completion
from server.api.pooling.endpoints import create_embeddings
from server.edge.error_replies import ModelNotFound
from server.edge.http.edge import EdgeSettings
from server.edge.http.endpoint import (
    ERRORS,
    NO_STORE,
    Endpoint,
    ReplyModel,
    documentation,
    in_json,
    json_reply,
)
from server.edge.http.health_listener import Question, health_page
from server.edge.http.json_body import parse_object
from server.edge.http.served_models import ServedModels, models_of

METRICS_PATH = "/metrics"

METRICS_TTL_S = 0.1
"""Some routers scrape every 50 ms; rendering costs milliseconds."""
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HealthPage(ReplyModel):
    status: Literal["ok", "unavailable"]
    state: Literal["loading", "ready", "draining", "dead"]
    detail: str
    progress: float
    num_steps: int
    degraded: list[str]
    """Work that cannot go on at the moment, though requests are served."""


class ServerLoad(ReplyModel):
    server_load: int
    """Requests that are admitted and not over."""


class Version(ReplyModel):
    version: str


_HEALTH_DOCUMENTATION: dict[str, Any] = {
    "responses": {200: {"content": in_json(HealthPage)}, 503: {"content": in_json(HealthPage)}}
}
_METRICS_DOCUMENTATION: dict[str, Any] = {
    "responses": {200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."}},
}

_BY_FIELD: Final[Mapping[str, Callable[[Request], Awaitable[Response]]]] = {
    "messages": create_chat_completion,
    "prompt": create_completion,
    "input": create_embeddings,
}
_CALL_DOCUMENTATION: dict[str, Any] = {
    "responses": {200: {"description": "As the endpoint that knows the fields of the body."}, **ERRORS},
    "openapi_extra": {
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    },
}


class Collected(Protocol):
    """A registry, or several joined."""

    def collect(self) -> Iterable[Metric]: ...


class MetricsPage:
    """The rendered registry, at most METRICS_TTL_S old; rendered in a thread, once for all that wait."""

    def __init__(self, registry: Collected, *, look: Callable[[], None] = lambda: None) -> None:
        """`look` sets the gauges that follow from the state of this moment, in the event loop."""
        self._look = look
        self._registry = registry
        self._rendering = asyncio.Lock()
        self._body = b""
        self._expires_s = 0.0

    async def render(self) -> bytes:
        clock = asyncio.get_running_loop().time
        async with self._rendering:
            if clock() >= self._expires_s:
                self._look()
                self._body = await asyncio.to_thread(generate_latest, self._registry)
                self._expires_s = clock() + METRICS_TTL_S
        return self._body


def _add_page(app: FastAPI, settings: EdgeSettings) -> None:  # noqa: ARG001 - for other endpoints
    models: ServedModels = app.state.models
    engines = [edge.engine for edge in models.edges]
    if len(engines) == 1:
        metrics = engines[0].metrics
        app.state.metrics_page = MetricsPage(metrics.registry, look=metrics.look)
        return

    def look() -> None:
        for each in engines:
            each.metrics.look()

    by_name = {each.names.served[0]: each.metrics.registry for each in engines}
    joined = JoinedRegistry(models.edges[0].metrics.registry, by_name)
    app.state.metrics_page = MetricsPage(joined, look=look)


router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    add_state=_add_page,
    # Kubelets, load balancers and Prometheus carry no key; none of the pages says anything about a request.
    open_paths=frozenset({"/health", "/health/live", "/health/ready", "/ping", METRICS_PATH}),
)


@router.get("/health", **_HEALTH_DOCUMENTATION)
@router.head("/health", include_in_schema=False)
@router.get("/health/ready", **_HEALTH_DOCUMENTATION)
@router.head("/health/ready", include_in_schema=False)
@router.get("/ping", **_HEALTH_DOCUMENTATION)
@router.head("/ping", include_in_schema=False)
async def is_ready(request: Request) -> Response:
    """Answer 200 if requests are accepted; 503 while loading, draining, stuck or dead."""
    return _answer(request, Question.READY)


@router.get("/health/live", **_HEALTH_DOCUMENTATION)
@router.head("/health/live", include_in_schema=False)
async def is_live(request: Request) -> Response:
    """Answer 503 only if a restart is the cure: the loop of a loaded engine stands still.

    A loading engine is live, and so is a dead one: it is replaced from within.
    """
    return _answer(request, Question.LIVE)


def _answer(request: Request, question: Question) -> Response:
    degraded = request.app.state.desk.degraded()
    models, asked = models_of(request), request.query_params.get("model")
    try:
        edge = None if asked is None else models.find(asked, None)
    except ModelNotFound:  # without a key, no list of the names that there are
        raise ModelNotFound(f"the model {asked!r} is not served here") from None
    health = models.health() if edge is None else edge.engine.health()
    if edge is not None and asked in edge.engine.names.variants:  # it says nothing of the model below
        health = replace(health, detail=health.state.value, progress=float(health.is_ready), num_steps=0)
    is_yes, body = health_page(health, question, degraded)
    return Response(body, 200 if is_yes else 503, headers=NO_STORE, media_type="application/json")


@router.get("/load", **documentation(ServerLoad))
async def show_load(request: Request) -> Response:
    """The number of requests under way."""
    loads = [edge.engine.load().num_requests for edge in models_of(request).edges]
    return json_reply({"server_load": sum(loads)}, NO_STORE)


@router.get("/version", **documentation(Version))
async def show_version() -> Response:
    """The version of the server."""
    return json_reply({"version": VERSION})


@router.get(METRICS_PATH, **_METRICS_DOCUMENTATION)
async def show_metrics(request: Request) -> Response:
    """All metrics, in Prometheus' text format."""
    page: MetricsPage = request.app.state.metrics_page
    return Response(await page.render(), media_type=_METRICS_TYPE)


@router.post("/invocations", **_CALL_DOCUMENTATION)
async def invoke(request: Request) -> Response:
    """Answer as a chat completion, a completion or embeddings: by `messages`, `prompt` or `input`."""
    body = parse_object(await request.body())
    for field, endpoint in _BY_FIELD.items():
        if body.get(field) is not None:
            return await endpoint(request)
    names = ", ".join(_BY_FIELD)
    raise RequestRejected(f"the body needs one of {names}", param="messages", code="missing_field")
