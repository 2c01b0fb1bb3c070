"""The application: the endpoints, and the layers that every request passes.

Owns: the order of the layers.
Never: the engine's life (launch.py), sockets and signals (the server that runs the application).

From outside in: prefix of a proxy, request id, log, count, origins of pages, error replies, places in
reserve, pages without a key, key, memory, body size, router. Each layer may rely on those outside of it;
whatever one of them raises becomes a reply in exactly one place.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from engine.frontend.memory_use import available_memory_bytes
from engine.options.api_keys import given_keys
from engine.options.edge_config import HostRule, PageParts
from engine.version import VERSION
from server.api.operations.ops import METRICS_PATH
from server.edge.access.auth import Auth
from server.edge.access.key_ring import KeyRing
from server.edge.access.memory_gate import MemoryGate
from server.edge.access.page_origins import PageOrigins
from server.edge.access.rate_limits import RATE_HEADERS
from server.edge.error_replies import ErrorBoundary
from server.edge.http.body_limit import BodyLimit
from server.edge.http.connections import LastReplies, ReservedPlaces
from server.edge.http.edge import ClientTimeouts, Edge, EdgeSettings, Engine, Parsers, UnknownFields
from server.edge.http.endpoint import Endpoint
from server.edge.http.request_log import RequestLog
from server.edge.http.root_path import RootPath
from server.edge.observe.http_metrics import HttpMetrics
from server.edge.observe.request_ids import RequestIds
from server.edge.observe.spans import NoSpans, Spans
from server.endpoints import (
    ADAPTERS,
    ADMIN,
    BATCH_PATHS,
    ERROR_SHAPES,
    KEYLESS_PATHS,
    OPEN_PATHS,
    OPENAPI_PATH,
    OPERATIONS,
    PAGE,
    POLLED_PATHS,
    PUBLIC,
    ROUTES,
    YARD,
)
from server.openapi import document
from server.reply.generate.full_queue import FullQueue


def build_app(
    engine: Engine,
    settings: EdgeSettings,
    *,
    patience: ClientTimeouts | None = None,
    keys: KeyRing | None = None,
    spans: Spans | None = None,
) -> FastAPI:
    """Put the HTTP edge in front of an engine, which need not be ready yet.

    Once for each engine: the counters join the engine's registry. `keys` is the ring that the launcher
    keeps current; without it the keys of `settings` are all.
    """
    edge = Edge(
        engine=engine,
        metrics=HttpMetrics(engine.metrics.registry),
        patience=patience or ClientTimeouts(),
        unknown_fields=UnknownFields.REFUSE if settings.strict_fields else UnknownFields.IGNORE,
        spans=spans or NoSpans(),
        parsers=Parsers(tool_calls=settings.tool_call_parser, reasoning=settings.reasoning_parser),
    )
    keys = keys or KeyRing(given_keys(settings.api_keys))
    app = _layered(edge, settings, keys, hosts=settings.edge.hosts, openapi_url=OPENAPI_PATH)
    endpoints = _endpoints(settings)
    _include(app, endpoints, settings)
    page: list[dict[str, Any]] = []

    def openapi() -> dict[str, Any]:
        if not page:
            without_key = _open_paths(settings) if keys.is_locked else None
            page.append(document(app, endpoints, without_key=without_key))
            if settings.edge.root_path:
                page[0]["servers"] = [{"url": settings.edge.root_path}]
        return page[0]

    # FastAPI's documented way to extend the document.
    app.openapi = openapi  # type: ignore[method-assign]
    return app


def build_admin_app(app: FastAPI, settings: EdgeSettings) -> FastAPI:
    """Build an application of the admin routes and the page, for a port of their own beside `build_app`'s."""
    edge: Edge = app.state.edge
    hosts = settings.edge.admin_hosts
    admin_app = _layered(edge, settings, app.state.keys, hosts=hosts, openapi_url=None)
    _include(admin_app, ADMIN if settings.edge.page is PageParts.OFF else (*PAGE, *ADMIN), settings)
    return admin_app


def _endpoints(settings: EdgeSettings) -> tuple[Endpoint, ...]:
    page = settings.edge.page
    endpoints = PUBLIC if page is PageParts.OFF else (*PAGE, *PUBLIC)  # its HEAD / goes first
    endpoints = (*endpoints, *(ADAPTERS if settings.loads_adapters else ()))
    if settings.enable_admin and settings.edge.admin_port is None:
        return (*endpoints, *ADMIN)
    return (*endpoints, *YARD) if page is PageParts.YARD else endpoints


def _include(app: FastAPI, endpoints: Sequence[Endpoint], settings: EdgeSettings) -> None:
    for each in endpoints:
        each.add_state(app, settings)
        app.include_router(each.router)


def _layered(
    edge: Edge, settings: EdgeSettings, keys: KeyRing, *, hosts: HostRule, openapi_url: str | None
) -> FastAPI:
    """An application without routes; `hosts` is its port's rule."""
    app = FastAPI(
        title="Tokenyard",
        summary="An OpenAI-compatible inference server.",
        version=VERSION,
        openapi_url=openapi_url,
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            *([Middleware(RootPath, prefix=prefix)] if (prefix := settings.edge.root_path) else []),
            Middleware(RequestIds),
            Middleware(
                RequestLog,
                routes=ROUTES,
                probes=OPEN_PATHS | KEYLESS_PATHS,
                polled=POLLED_PATHS,
                spans=edge.spans,
                metrics=edge.metrics,
            ),
            *_cors(settings.edge.cors_origins),
            Middleware(LastReplies, health=edge.engine.health),
            Middleware(ErrorBoundary, count=edge.metrics.count_error, shapes=ERROR_SHAPES),
            Middleware(ReservedPlaces, open_paths=OPEN_PATHS),
            Middleware(
                PageOrigins,
                keys=keys,
                origins=settings.edge.cors_origins,
                hosts=hosts,
                open_paths=OPEN_PATHS,
            ),
            Middleware(Auth, keys=keys, open_paths=_keyless_paths(settings)),
            Middleware(MemoryGate, max_use=settings.edge.max_memory_use),
            Middleware(
                BodyLimit,
                max_body_bytes=settings.max_body_bytes,
                available_bytes=available_memory_bytes if settings.edge.max_memory_use < 1 else None,
            ),
        ],
        exception_handlers={HTTPException: _to_boundary, RequestValidationError: _to_boundary},
    )
    app.state.edge = edge
    app.state.keys = keys
    app.state.batch_paths = BATCH_PATHS
    app.state.full_queue = FullQueue(edge, keys, paths=frozenset(OPERATIONS), shapes=ERROR_SHAPES)
    return app


def _open_paths(settings: EdgeSettings) -> frozenset[str]:
    return OPEN_PATHS - {METRICS_PATH} if settings.edge.metrics_auth else OPEN_PATHS


def _keyless_paths(settings: EdgeSettings) -> frozenset[str]:
    open_paths = _open_paths(settings)
    return open_paths if settings.edge.page is PageParts.OFF else open_paths | KEYLESS_PATHS


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """CORS, outside of the keys: a browser asks for permission without one."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[
                *("x-request-id", "retry-after", "retry-after-ms", "x-should-retry"),
                *RATE_HEADERS,
            ],
        )
    ]


async def _to_boundary(request: Request, error: Exception) -> NoReturn:  # noqa: ARG001 -- Starlette's signature
    """Hand errors on that the framework would answer in its own shape."""
    raise error
