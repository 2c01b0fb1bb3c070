"""Who may ask: a bearer key on every path except those that probes and scrapers read.

Owns: the comparison of keys, by hash and in constant time.
Never: what a key may do (one kind of key, all routes), or where keys come from (engine/options.py).
"""

import hashlib
import secrets
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import InvalidApiKey

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
"""Kubelets, load balancers and Prometheus carry no key; neither page says anything about a request."""


KEY_NAME = "tokenyard.key"
"""Where the scope tells which key opened the door: `key-1` is the first."""


class Auth:
    """ASGI middleware. Without keys everything is open."""

    def __init__(self, app: ASGIApp, *, api_keys: Iterable[str]) -> None:
        self._app = app
        self._digests = tuple(_digest(key.encode()) for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Decided on the path that the router matches too: a header or a host can be forged.
        if scope["type"] == "http" and self._digests and scope["path"] not in OPEN_PATHS:
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:
            raise InvalidApiKey("no API key: send it in the header Authorization: Bearer <key>")
        scheme, _, key = given[0].partition(b" ")
        digest = _digest(key.strip())
        # All keys are compared, whether or not one has matched: the time must not tell which.
        matches = [secrets.compare_digest(digest, known) for known in self._digests]
        if len(given) > 1 or scheme.lower() != b"bearer" or not any(matches):
            raise InvalidApiKey("this API key is not known here")
        scope[KEY_NAME] = f"key-{matches.index(True) + 1}"


def _digest(key: bytes) -> bytes:
    """Give all keys the same length, so that comparing them tells nothing of theirs."""
    return hashlib.sha256(key).digest()
