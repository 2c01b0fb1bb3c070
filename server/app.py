"""The application: the endpoints behind the layers that every request passes.

Owns: the endpoints that the settings ask for, and the objects that they share.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request

from engine.options.api_keys import given_keys
from engine.options.edge_config import HostRule, PageParts
from engine.version import VERSION
from server.api.operations.ops import METRICS_PATH
from server.edge.access.key_ring import KeyRing
from server.edge.http.edge import ClientTimeouts, Edge, EdgeSettings, Engine, Parsers, Served, UnknownFields
from server.edge.http.endpoint import DirectCalls, Endpoint
from server.edge.http.served_models import LeaseEnd, ServedModels
from server.edge.layers import LayerPaths, layers
from server.edge.observe.http_metrics import HttpMetrics
from server.edge.observe.spans import NoSpans, Spans
from server.endpoints import (
    ADAPTERS,
    ADMIN,
    ADMIN_PAGE,
    BATCH_PATHS,
    ERROR_SHAPES,
    EVENT_SHAPES,
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
    models: Sequence[Served] = (),
) -> FastAPI:
    """Put the HTTP edge in front of an engine, which need not be ready yet.

    Once for each engine: the counters join the engine's registry. `keys` is the ring that the launcher
    keeps current; without it the keys of `settings` are all. `models` are all models at this address, if
    there are several or they come and go; then `engine` is the first one's.
    """
    edge = Edge(
        engine=engine,
        metrics=HttpMetrics(CollectorRegistry() if len(models) > 1 else engine.metrics.registry),
        patience=patience or ClientTimeouts(),
        unknown_fields=UnknownFields.REFUSE if settings.strict_fields else UnknownFields.IGNORE,
        spans=spans or NoSpans(),
        parsers=Parsers(tool_calls=settings.tool_call_parser, reasoning=settings.reasoning_parser),
    )
    edges = [replace(edge, engine=each.engine, parsers=each.parsers, place=each.place) for each in models]
    served = ServedModels(edges or [edge])
    keys = keys or KeyRing(given_keys(settings.api_keys))
    endpoints = _endpoints(settings)
    app = _application(served, settings, keys, endpoints, hosts=settings.edge.hosts, openapi_url=OPENAPI_PATH)
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
    """Build an application of the admin routes and the page, for a port of their own."""
    endpoints = ADMIN if settings.edge.page is PageParts.OFF else (*ADMIN_PAGE, *ADMIN)
    hosts = settings.edge.admin_hosts
    return _application(app.state.models, settings, app.state.keys, endpoints, hosts=hosts, openapi_url=None)


def _endpoints(settings: EdgeSettings) -> tuple[Endpoint, ...]:
    page = settings.edge.page
    endpoints = PUBLIC if page is PageParts.OFF else (*PAGE, *PUBLIC)  # its HEAD / goes first
    endpoints = (*endpoints, *(ADAPTERS if settings.loads_adapters else ()))
    if settings.enable_admin and settings.edge.admin_port is None:
        return (*endpoints, *ADMIN)
    return (*endpoints, *YARD) if page is PageParts.YARD else endpoints


_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""Switches of the telemetry in FastAPI, which looks for providers at each request: the server has its own."""


def _application(
    models: ServedModels,
    settings: EdgeSettings,
    keys: KeyRing,
    endpoints: Sequence[Endpoint],
    *,
    hosts: HostRule,
    openapi_url: str | None,
) -> FastAPI:
    """Put the layers around endpoints; `hosts` is the rule of their port."""
    edge = models.edges[0]
    lease_end = Middleware(LeaseEnd, count=edge.metrics.count_error, shapes=EVENT_SHAPES)
    app = FastAPI(
        title="Tokenyard",
        summary="An OpenAI-compatible inference server.",
        version=VERSION,
        openapi_url=openapi_url,
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
        middleware=[
            *layers(edge, settings, keys, hosts=hosts, paths=_paths(settings)),
            *([] if edge.place is None else [lease_end]),
            Middleware(DirectCalls, endpoints=endpoints),
        ],
        exception_handlers={HTTPException: _to_boundary, RequestValidationError: _to_boundary},
    )
    app.state.edge = edge
    app.state.models = models
    app.state.keys = keys
    app.state.batch_paths = BATCH_PATHS
    app.state.full_queue = FullQueue(edge, keys, paths=frozenset(OPERATIONS), shapes=ERROR_SHAPES)
    methods = app.state.methods = defaultdict[str, set[str]](set)
    for each in endpoints:
        each.add_state(app, settings)
        app.include_router(each.router)
        for path, method in each.methods:
            methods[path].add(method)
    return app


def _paths(settings: EdgeSettings) -> LayerPaths:
    without_key = _open_paths(settings)
    return LayerPaths(
        routes=ROUTES,
        open=OPEN_PATHS,
        quiet=OPEN_PATHS | KEYLESS_PATHS,
        polled=POLLED_PATHS,
        without_key=without_key if settings.edge.page is PageParts.OFF else without_key | KEYLESS_PATHS,
        error_shapes=ERROR_SHAPES,
    )


def _open_paths(settings: EdgeSettings) -> frozenset[str]:
    return OPEN_PATHS - {METRICS_PATH} if settings.edge.metrics_auth else OPEN_PATHS


async def _to_boundary(request: Request, error: Exception) -> NoReturn:
    """Hand errors on that the framework would answer in its own shape.

    A 405 names all methods of its path: the router knows those of one route.
    """
    if isinstance(error, HTTPException) and error.status_code == 405:
        route = request.scope.get("route")  # /openapi.json is no route of ours
        methods = request.app.state.methods.get(getattr(route, "path_format", ""))
        error.headers = {"Allow": ", ".join(sorted(methods))} if methods else error.headers
    raise error
