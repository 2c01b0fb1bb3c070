"""What the edge counts: replies by route and status, ignored fields, connections given up.

Owns: counters with labels from fixed sets only; no client can make a new series.
Never: the engine's own metrics; both live in the engine's registry and appear on one page.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.route_names import RouteNames

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_CLIENT_LEFT = 499
"""As in nginx's log: the client hung up before a status was sent."""


class HttpMetrics:
    """The counters, created once per engine registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "tokenyard:http_requests",
            "HTTP requests answered, by method, route and status; 499: the client left first.",
            ("method", "route", "status"),
            registry=registry,
        )
        self.errors = Counter(
            "tokenyard:request_errors",
            "Errors told to clients, in replies and in streams, by code.",
            ("code",),
            registry=registry,
        )
        self.unknown_fields = Counter(
            "tokenyard:unknown_request_fields",
            "Fields in request bodies that this server does not know and ignored.",
            registry=registry,
        )
        self.refused_connections = Counter(
            "tokenyard:refused_connections",
            "Connections closed at once because every place was taken, the reserve for probes too.",
            registry=registry,
        )
        self.slow_client_aborts = Counter(
            "tokenyard:slow_client_aborts",
            "Streams given up because the client stopped reading.",
            registry=registry,
        )

    def error_told(self, code: str) -> None:
        """`code` is one of the catalogue, so that there are no more series than rows in it."""
        self.errors.labels(code).inc()


class RequestCounter:
    """ASGI middleware: one count per request, when it is over."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics, routes: Iterable[str]) -> None:
        self._app = app
        self._requests = metrics.requests
        self._routes = RouteNames(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_LEFT

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._requests.labels(method, self._routes.of(scope["path"]), str(status)).inc()
