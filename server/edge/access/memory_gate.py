"""Refusal of new work while memory is nearly used up, since otherwise the kernel would end the process.

Owns: the requests that count as new work.
Never: measures (engine/frontend/memory_use.py), or ends running requests.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.frontend.memory_use import MemoryGauge
from server.edge.access.auth import ADMIN_PATHS
from server.edge.error_replies import LowMemory


class MemoryGate:
    """ASGI middleware. Stands before the body is read, which may be the largest part of a request."""

    def __init__(self, app: ASGIApp, *, max_use: float, gauge: MemoryGauge | None = None) -> None:
        """`max_use` is a share of the memory; 1 lets everything pass."""
        self._app = app
        self._max_use = max_use
        self._gauge = gauge or MemoryGauge()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_new_work = (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and not scope["path"].startswith(ADMIN_PATHS)  # may be the cure
        )
        if is_new_work and self._max_use < 1 and self._gauge.share() >= self._max_use:
            raise LowMemory
        await self._app(scope, receive, send)
