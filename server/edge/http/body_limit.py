"""Limits of a body before it is parsed, and of new work while memory is short.

Owns: the bytes of a body, declared, chunked or lied about, its pauses and total time, and the requests that
count as new work.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import Overloaded, RequestRejected
from engine.frontend.memory_use import MemoryGauge, available_memory_bytes
from server.edge.access.auth import ADMIN_PATHS
from server.edge.error_replies import BodyTimeout, BodyTooLarge, LowMemory
from server.edge.sockets.trimming import trim_soon

BODY_IDLE_S = 30.0
"""A body that stands still for that long is given up."""
MIN_BYTES_PER_S = 1024
"""Bytes that buy a second of patience. A fast client cannot save up more than BODY_IDLE_S: otherwise a body
that is nearly whole would hold its part of the budget of all for an hour, at a byte every BODY_IDLE_S."""

_DRAIN_BYTES = 32 * 1024 * 1024
_DRAIN_S = 2.0
_DRAIN_PAUSE_S = 0.25
"""Bytes of a body that is too large which are still read, and for how long. A client that is cut off
while it sends sees a reset connection instead of the reason."""


_BUDGET_BYTES = 64 * 1024 * 1024
"""Bytes of the bodies of all requests under way, from their arrival to the end of their replies."""
_FREE_BYTES = 64 * 1024
"""Bytes of each body that are held even beyond the budget: small requests pass while large ones fill it."""
_MEMORY_PER_BYTE = 4
"""Bytes of memory that must be left for each byte of a body: it is joined, decoded and parsed."""
_MEMORY_READ_EVERY_S = 0.05
"""Time for which a reading of the memory that is left holds: it takes a third of a millisecond."""
_TRIMMED_BYTES = 1024 * 1024


class BodyLimit:
    """ASGI middleware. Its errors surface where the body is read."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        idle_s: float = BODY_IDLE_S,
        available_bytes: Callable[[], int] | None = available_memory_bytes,
    ) -> None:
        """`available_bytes` is the memory that is left, or None to ask for none."""
        self._app = app
        self._budget_bytes = max(_BUDGET_BYTES, 4 * max_body_bytes)
        self._available_bytes = available_bytes
        self._memory_bytes = self._budget_bytes
        self._memory_read_s = -inf
        self._held_bytes = 0
        self._max_bytes = max_body_bytes
        self._idle_s = idle_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        _check_framing(scope, headers)
        if _declared_bytes(headers) > self._max_bytes:
            # Reading would be the go-ahead for a client that waits for one.
            if b"expect" not in headers:
                await _drain(receive)
            raise self._too_large()
        num_bytes = 0
        is_complete = False
        patience_s = self._idle_s
        clock = asyncio.get_running_loop().time

        async def counted_receive() -> Message:
            nonlocal num_bytes, is_complete, patience_s
            if is_complete:  # what follows can only be the hang-up, which may take its time
                return await receive()
            began_s = clock()
            try:
                async with asyncio.timeout(patience_s):
                    message = await receive()
            except TimeoutError:
                raise BodyTimeout(
                    f"the request body stood still for {self._idle_s:g} s,"
                    f" or brought less than {MIN_BYTES_PER_S} bytes a second"
                ) from None
            new_bytes = len(message.get("body", b""))
            bought_s = new_bytes / MIN_BYTES_PER_S
            patience_s = min(self._idle_s, patience_s - (clock() - began_s) + bought_s)
            num_bytes += new_bytes
            self._hold(new_bytes, num_bytes)
            is_complete = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                if not is_complete:
                    await _drain(receive)
                raise self._too_large()
            return message

        try:
            await self._app(scope, counted_receive, send)
        finally:
            self._let_go(num_bytes)

    def _hold(self, new_bytes: int, num_bytes: int) -> None:
        """Count bytes of a body that has `num_bytes` so far.

        Raises Overloaded beyond the budget of all, and LowMemory where there is less memory than that.
        """
        self._held_bytes += new_bytes
        if num_bytes <= _FREE_BYTES:
            return
        self._read_memory()
        if self._held_bytes > self._budget_bytes:
            raise Overloaded("too many large requests are held; try again later", retry_after_s=1.0)
        if self._held_bytes > self._memory_bytes:
            raise LowMemory

    def _read_memory(self) -> None:
        now_s = time.monotonic()
        if self._available_bytes is None or now_s - self._memory_read_s < _MEMORY_READ_EVERY_S:
            return
        self._memory_read_s = now_s
        with suppress(OSError):  # no descriptor is free: the reading before stays in force
            self._memory_bytes = self._held_bytes + self._available_bytes() // _MEMORY_PER_BYTE

    def _let_go(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes
        if num_bytes > _TRIMMED_BYTES:
            trim_soon()

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the request body is larger than the {self._max_bytes} bytes allowed here")


async def _drain(receive: Receive) -> None:
    """Read and drop the rest of the body, within limits of bytes and time."""
    num_bytes = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while num_bytes < _DRAIN_BYTES:
                async with asyncio.timeout(_DRAIN_PAUSE_S):
                    message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _check_framing(scope: Scope, headers: Mapping[bytes, bytes]) -> None:
    """Refuse a request with two lengths: a proxy may see another end of it than we do.

    The same holds for a transfer coding in HTTP/1.0, which has none. Source: RFC 9112, section 6.1.
    """
    if b"transfer-encoding" not in headers:
        return
    if scope.get("http_version") == "1.0":
        raise RequestRejected("HTTP/1.0 has no Transfer-Encoding", code="invalid_request")
    if b"content-length" in headers:
        raise RequestRejected(
            "send either Content-Length or Transfer-Encoding, not both", code="invalid_request"
        )


def _declared_bytes(headers: Mapping[bytes, bytes]) -> int:
    """Read Content-Length; 0 where it is absent or no number: the bytes are counted anyway."""
    value = headers.get(b"content-length", b"")
    return int(value) if value.isdigit() and len(value) <= 20 else 0


class MemoryGate:
    """ASGI middleware. Stands before the body is read, which may be the largest part of a request."""

    def __init__(self, app: ASGIApp, *, max_use: float, gauge: MemoryGauge | None = None) -> None:
        """`max_use` is a share of the memory; 1 lets everything pass."""
        self._app = app
        self._max_use = max_use
        self._gauge = gauge or MemoryGauge()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # An admin's POST may be the cure.
        is_new_work = scope["method"] == "POST" and not scope["path"].startswith(ADMIN_PATHS)
        if is_new_work and self._max_use < 1 and self._gauge.share() >= self._max_use:
            raise LowMemory
        await self._app(scope, receive, send)
