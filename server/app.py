"""The application: routes, and the layers that every request passes.

Owns: the order of the layers.
Never: the engine's life (launch.py), sockets and signals (the server that runs the application).

From outside in: request id, count, error replies, places in reserve, key, body size, router. Each layer may
rely on those outside of it; whatever one of them raises becomes a reply in exactly one place.
"""

from typing import Any, NoReturn

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request

from server import admin, chat, completions, embeddings, models, ops, responses, scoring, tokenization
from server.answering import VERSION
from server.auth import OPEN_PATHS, Auth
from server.body_limit import BodyLimit
from server.connections import ReservedPlaces
from server.edge import Edge, EdgeSettings, Engine, Parsers, Patience, UnknownFields
from server.errors import ErrorBoundary
from server.http_metrics import HttpMetrics, RequestCounter
from server.openapi import document
from server.request_ids import RequestIds
from server.response_store import ResponseStore

_ROUTES = (
    *OPEN_PATHS,
    "/admin/requests",
    "/admin/reset_prefix_cache",
    "/openapi.json",
    "/version",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/tokenize",
    "/detokenize",
)
"""Labels of the request counter; a test holds them against the router."""


def build_app(engine: Engine, settings: EdgeSettings, *, patience: Patience | None = None) -> FastAPI:
    """Put the HTTP edge in front of an engine, which need not be ready yet.

    Once for each engine: the counters join the engine's registry.
    """
    edge = Edge(
        engine=engine,
        metrics=HttpMetrics(engine.metrics.registry),
        patience=patience or Patience(),
        unknown_fields=UnknownFields.REFUSE if settings.strict_fields else UnknownFields.IGNORE,
        parsers=Parsers(tool_calls=settings.tool_call_parser, reasoning=settings.reasoning_parser),
    )
    app = FastAPI(
        title="Tokenyard",
        summary="An OpenAI-compatible inference server.",
        version=VERSION,
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(RequestIds),
            Middleware(RequestCounter, metrics=edge.metrics, routes=_ROUTES),
            Middleware(ErrorBoundary, count=edge.metrics.error_told),
            Middleware(ReservedPlaces),
            Middleware(Auth, api_keys=tuple(settings.api_keys)),
            Middleware(BodyLimit, max_body_bytes=settings.max_body_bytes),
        ],
        exception_handlers={HTTPException: _to_boundary, RequestValidationError: _to_boundary},
    )
    app.state.edge = edge
    app.state.response_store = ResponseStore(
        max_responses=settings.responses_store_size,
        max_bytes=settings.responses_store_bytes,
        ttl_s=settings.responses_store_ttl_s,
    )
    app.state.metrics_page = ops.MetricsPage(engine.metrics.registry)
    always = (chat, completions, models, ops, responses, tokenization, embeddings, scoring)
    for part in (*always, *((admin,) if settings.enable_admin else ())):
        app.include_router(part.router)
    page: list[dict[str, Any]] = []

    def openapi() -> dict[str, Any]:
        if not page:
            page.append(document(app, needs_key=bool(settings.api_keys)))
        return page[0]

    # FastAPI's documented way to extend the document.
    app.openapi = openapi  # type: ignore[method-assign]
    return app


async def _to_boundary(request: Request, error: Exception) -> NoReturn:  # noqa: ARG001 -- Starlette's signature
    """Hand on what the framework would answer in its own shape."""
    raise error
