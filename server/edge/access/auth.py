"""Authentication: a bearer key on every path except those that probes and scrapers read.

Owns: the key of a request, the paths that need a special one, and the words of a refusal.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.options.api_keys import ApiKey
from server.edge.access.key_ring import KeyRing
from server.edge.access.rate_limits import Allowance, Caller, RateLimits
from server.edge.access.sent_key import OWNER_NAME, keep_key, key_of
from server.edge.error_replies import InvalidApiKey, NotPermitted
from server.edge.observe.request_ids import journal_of

ADMIN_PATHS = ("/admin/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/models/")
"""Beginnings of the paths that need a key which may administer."""

_ALLOWANCE = "tokenyard.allowance"


class Auth:
    """ASGI middleware. Without keys everything is open; with keys, nothing but the open paths."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Decided on the path that the router matches too: a header or a host can be forged.
        if not self._keys.is_locked or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        owner = scope.get(OWNER_NAME)
        if owner is not None:
            keep_key(scope, self._named(owner))
            await self._settled(scope, receive, send)
            return
        key = self._identify(scope)
        if scope["path"].startswith(ADMIN_PATHS) and not key.may_administer:
            raise NotPermitted("this key may not administer the server; use one that may")
        keep_key(scope, key)
        with self._keys.under_way(key):
            await self._settled(scope, receive, send)

    async def _settled(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, and count the tokens of its output when it is over."""
        try:
            await self._app(scope, receive, send)
        finally:
            allowance: Allowance | None = scope.get(_ALLOWANCE)
            if allowance is not None:
                allowance.settle(journal_of(scope).num_output_tokens)

    def _named(self, owner: str) -> ApiKey:
        key = self._keys.named(owner)
        if key is None:
            raise InvalidApiKey("the API key of this batch is not known here any more")
        return key

    def _identify(self, scope: Scope) -> ApiKey:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:  # Anthropic's clients have a header of their own
            given = [b"bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
        if not given:
            raise InvalidApiKey("no API key: send it in the header Authorization: Bearer <key>")
        scheme, _, text = given[0].partition(b" ")
        key = self._keys.find(text.strip())
        if len(given) > 1 or scheme.lower() != b"bearer" or key is None:
            raise InvalidApiKey("this API key is not known here")
        return key


def open_allowance(scope: Scope, rates: RateLimits) -> Allowance:
    """Begin to count this request against the limits of its key; its output is counted when it is over."""
    caller = Caller.BATCH if scope.get(OWNER_NAME) is not None else Caller.CLIENT
    allowance = Allowance(rates, key_of(scope), caller)
    scope[_ALLOWANCE] = allowance
    return allowance
