"""The layers that every request passes before it reaches a route.

Owns: their order, and the prefix that a proxy leaves before every path, if the operator names one.

From outside in: prefix of a proxy, request id, log and count, CORS, last replies, error replies, places in
reserve, pages and hosts without a key, key, memory, body size, functions of operations, router. Each may rely
on those outside of it; whatever one of them raises becomes a reply in exactly one place. All scopes are of
HTTP: the server has neither websockets nor a lifespan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.frontend.memory_use import available_memory_bytes
from engine.options.edge_config import HostRule
from server.edge.access.auth import Auth
from server.edge.access.key_ring import KeyRing
from server.edge.access.page_origins import PageOrigins
from server.edge.access.rate_limits import RATE_HEADERS
from server.edge.error_replies import ErrorBoundary, ErrorShape
from server.edge.http.body_limit import BodyLimit, MemoryGate
from server.edge.http.connections import LastReplies, ReservedPlaces
from server.edge.http.edge import Edge, EdgeSettings
from server.edge.http.request_log import RequestLog
from server.edge.observe.request_ids import RequestIds

_TO_THE_PAGE = b"/"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPaths:
    """The paths that layers treat differently."""

    routes: frozenset[str]
    """Names of all routes, for the log and the counters."""
    open: frozenset[str]
    """Probes: they have places in reserve, and are asked by any name of the host."""
    quiet: frozenset[str]
    """Logged at DEBUG, and not traced."""
    polled: frozenset[str]
    without_key: frozenset[str]
    error_shapes: Mapping[str, ErrorShape]
    """Shapes of errors, where they are not OpenAI's."""


def layers(
    edge: Edge, settings: EdgeSettings, keys: KeyRing, *, hosts: HostRule, paths: LayerPaths
) -> list[Middleware]:
    """List the layers of one port, the outermost first; `hosts` is its rule."""
    origins = settings.edge.cors_origins
    return [
        *([Middleware(RootPath, prefix=prefix)] if (prefix := settings.edge.root_path) else []),
        Middleware(RequestIds),
        Middleware(
            RequestLog,
            routes=paths.routes,
            probes=paths.quiet,
            polled=paths.polled,
            spans=edge.spans,
            metrics=edge.metrics,
        ),
        *_cors(origins),
        Middleware(LastReplies, health=edge.engine.health),
        Middleware(ErrorBoundary, count=edge.metrics.count_error, shapes=paths.error_shapes),
        Middleware(ReservedPlaces, open_paths=paths.open),
        Middleware(PageOrigins, keys=keys, origins=origins, hosts=hosts, open_paths=paths.open),
        Middleware(Auth, keys=keys, open_paths=paths.without_key),
        Middleware(MemoryGate, max_use=settings.edge.max_memory_use),
        Middleware(
            BodyLimit,
            max_body_bytes=settings.max_body_bytes,
            available_bytes=available_memory_bytes if settings.edge.max_memory_use < 1 else None,
        ),
    ]


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


class RootPath:
    """ASGI middleware, outside of all layers: they see the paths of this server."""

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        """`prefix` begins with a slash and ends without one."""
        self._app = app
        self._prefix = prefix
        self._raw_prefix = prefix.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == self._prefix:
            # Without the slash a browser would look for the page's files next to the prefix, not below it.
            location = (b"location", self._raw_prefix + _TO_THE_PAGE)
            await send(
                {
                    "type": "http.response.start",
                    "status": 308,
                    "headers": [location, (b"content-length", b"0")],
                }
            )
            await send({"type": "http.response.body", "body": b""})
            return
        if scope["path"].startswith(f"{self._prefix}/"):
            raw = scope.get("raw_path") or scope["path"].encode()
            scope = {
                **scope,
                "path": scope["path"].removeprefix(self._prefix),
                "raw_path": raw.removeprefix(self._raw_prefix),
            }
        await self._app(scope, receive, send)
