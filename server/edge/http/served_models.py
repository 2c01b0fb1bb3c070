"""The models behind one address, as requests ask for them.

Owns: the model of a request: the one that its body or its query names, among those that its key may use.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import cast

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import AdapterConflict, EngineUnavailable, Overloaded, RequestRejected
from engine.models.joined_health import joined_health
from engine.models.table import NameTable, is_hidden, resolve, visible
from engine.models.yard import Waiting, YardPlace
from engine.options.api_keys import ApiKey
from engine.types import Health, ModelInfo
from server.edge.access.sent_key import OWNER_NAME, key_of
from server.edge.error_replies import ErrorShape, ModelNotFound, shape_at
from server.edge.http.disconnect import while_connected
from server.edge.http.edge import CHOSEN, Edge, edge_of
from server.edge.observe.request_ids import journal_of
from server.edge.waiting_stream import WaitingStream, comment_on_load

LOAD_HEADER = "x-tokenyard-load"
_LEASE = "tokenyard.lease"
"""The scope's entry with the place of a model that the request keeps loaded."""
_NAME = "tokenyard.asked_name"
"""The scope's entry with the name by which the request chose its model."""
_MOST_NAMES = 16
_LATEST = ":latest"
"""The tag that Ollama's clients add to names."""


class ServedModels:
    """The models, each with its edge. The first answers requests that name none."""

    def __init__(self, edges: Sequence[Edge]) -> None:
        self.edges = tuple(edges)

    def find(self, name: str | None, key: ApiKey | None, *, tag: str = "") -> Edge:
        """Find the model that a request means, with or without a tag at its name. Raises ModelNotFound."""
        everything = self._table(None)
        table = visible(everything, key.models if key else None)
        spellings = [name] if name is None or not tag else [name, name.removesuffix(tag)]
        place = next((found for each in spellings if (found := resolve(each, table)) is not None), None)
        if place is None or any(is_hidden(each, everything, table) for each in spellings if each is not None):
            raise not_served(
                name, [each for names in table for each in (*names.patterns, *names.served, *names.variants)]
            )
        return self.edges[place]

    def health(self) -> Health:
        if len(self.edges) == 1:
            return self.edges[0].engine.health()
        return joined_health({edge.engine.names.served[0]: edge.engine.health() for edge in self.edges})

    def for_adapter(self, name: str, base: str | None, key: ApiKey | None) -> Edge:
        """Find the model for a new adapter, which may name it. Raises ModelNotFound, RequestRejected."""
        if len(self.edges) == 1:
            return self.edges[0]
        takers = [edge for edge in self.edges if edge.engine.takes_adapters]
        if base is None and len(takers) > 1:
            bases = ", ".join(edge.engine.names.served[0] for edge in takers)
            why = f"base_model_name: several models take adapters: {bases}"
            raise RequestRejected(why, param="base_model_name", code="missing_field")
        edge = self.find(base, key) if base is not None else takers[0]
        for other in self.edges:
            names = other.engine.names
            if other is not edge and name in (*names.served, *names.variants):
                raise AdapterConflict(f"{name!r} is a name of {names.served[0]}", param="lora_name")
        return edge

    def listed(self, key: ApiKey | None) -> list[tuple[Edge, ModelInfo | None, tuple[str, ...]]]:
        """List the models that are loaded or come when they are asked for, with the names that a key may use.

        The facts of one that was never loaded are not known. Raises EngineUnavailable if there is none.
        """
        found: list[tuple[Edge, ModelInfo | None, tuple[str, ...]]] = []
        why: EngineUnavailable | None = None
        for edge, names in zip(self.edges, self._table(key), strict=True):
            shown = (*names.served, *names.variants)
            try:
                if shown:
                    found.append((edge, edge.engine.info, shown))
            except EngineUnavailable as error:
                if edge.place is not None:
                    found.append((edge, None, shown))
                why = why or error
        if why is not None and not found:
            raise why
        return found

    def shows(self, edge: Edge, key: ApiKey | None) -> bool:
        """Tell whether a key sees a model itself, and not only variants of it."""
        return bool(self._table(key)[self.edges.index(edge)].served)

    def _table(self, key: ApiKey | None) -> NameTable:
        return visible([edge.engine.names for edge in self.edges], key.models if key else None)


def models_of(request: Request) -> ServedModels:
    return cast(ServedModels, request.app.state.models)


def choose_model(request: Request, name: str | None, *, tag: str = "") -> Edge:
    """Choose the model of a request, which `edge_of` returns from then on. Raises ModelNotFound."""
    models = models_of(request)
    edge = models.find(name, key_of(request.scope), tag=tag)
    request.scope[CHOSEN], request.scope[_NAME] = edge, name
    if len(models.edges) > 1:
        journal_of(request.scope).model = edge.engine.names.served[0]
    return edge


def choose_for_ollama(request: Request, name: str | None) -> Edge:
    """Choose as `choose_model`, by a name that may have the tag of Ollama's clients."""
    return choose_model(request, name, tag=_LATEST)


def choose_by_query(request: Request) -> Edge:
    """Choose the model that `?model=` names, on a route without a body. Raises ModelNotFound."""
    return choose_model(request, request.query_params.get("model"))


async def lease_model(request: Request, *, is_patient: bool = False, is_stream: bool = False) -> None:
    """Keep the request's model from leaving until the request is over, and wait until it is loaded.

    With `is_patient`, and for lines of batches, behind calls for which a client waits. A stream of events
    says meanwhile how far the model is.
    Raises EngineUnavailable, Overloaded, ClientDisconnect.
    """
    edge = edge_of(request)
    if (place := edge.place) is None:
        return
    asked = request.headers.get(LOAD_HEADER, "yes")
    if asked not in ("yes", "no"):
        raise RequestRejected(f"{LOAD_HEADER} must be yes or no", param=LOAD_HEADER)
    waiting = Waiting.IN_LINE if asked == "yes" else Waiting.REFUSED
    if asked == "yes" and (is_patient or request.scope.get(OWNER_NAME) is not None):
        waiting = Waiting.BACKGROUND

    async def take() -> None:
        await place.lease(waiting)
        request.scope[_LEASE] = place  # before anything else is awaited, which may be cancelled

    silence_s = edge.patience.keep_alive_s if is_stream else 0.0
    commenting = asyncio.create_task(comment_on_load(request.scope, edge.engine.health, silence_s))
    try:
        await while_connected(request.receive, take())
    except (EngineUnavailable, Overloaded) as error:
        if not models_of(request).shows(edge, key_of(request.scope)):
            error.args = (f"{request.scope[_NAME]} cannot be served now; try again later",)
        raise
    finally:
        commenting.cancel()


def end_lease(scope: Scope) -> None:
    """Let the request's model leave: all that it still computes is done by work with a lease of its own."""
    place: YardPlace | None = scope.pop(_LEASE, None)
    if place is not None:
        place.release()


def held(edge: Edge) -> AbstractAsyncContextManager[None]:
    """Keep a model loaded for work that no request waits for."""
    return nullcontext() if edge.place is None else edge.place.held(Waiting.BACKGROUND)


class LeaseEnd:
    """ASGI middleware, inside of all layers: ends the lease of a request with its last byte."""

    def __init__(
        self, app: ASGIApp, *, count: Callable[[str], None], shapes: Mapping[str, ErrorShape]
    ) -> None:
        """`count` and `shapes` as of ErrorBoundary."""
        self._app, self._count, self._shapes = app, count, shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = WaitingStream(scope, send)
        try:
            await self._app(scope, receive, stream.send)
        except Exception as error:
            if not stream.has_begun:
                raise
            await stream.fail(error, self._count, shape_at(scope.get("path", ""), self._shapes))
        finally:
            end_lease(scope)


def not_served(name: str | None, names: Iterable[str]) -> ModelNotFound:
    """Make the error for a name that means no model, or none that the key may use."""
    known = ", ".join([*names][:_MOST_NAMES])
    if not known:
        return ModelNotFound("no model is served here for this key")
    return ModelNotFound(f"the model {name!r} is not served here; there is: {known}")
