"""The edge: the objects that every route uses, kept in the state of the application."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from starlette.requests import Request

from engine.types import TokenOutput
from server.edge.http.listening import num_connections_allowed
from server.edge.observe.http_metrics import HttpMetrics
from server.edge.observe.spans import NoSpans, Spans

if TYPE_CHECKING:  # names alone: what a route is given was made by server/command/startup/serving.py
    from engine.frontend.client import AsyncEngine
    from engine.models.yard import YardPlace
    from engine.options.engine_config import ServerConfig

NumberedOutputs = AsyncGenerator[tuple[int, TokenOutput], None]
"""Each output with the place of its request among those of one HTTP request."""
Engine: TypeAlias = "AsyncEngine"
EdgeSettings: TypeAlias = "ServerConfig"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimeouts:
    """Time limits for clients, and the number of their connections."""

    keep_alive_s: float = 45.0
    """Silence after which a comment line is sent, so that no proxy takes the stream for dead; 0: none."""
    send_timeout_s: float = 30.0
    """Seconds in which a client may leave its socket full before its request is aborted."""
    head_timeout_s: float = 10.0
    """Seconds from a connection, or from the first byte of a further request, to the end of the head."""
    max_connections: int = field(default_factory=num_connections_allowed)
    """Beyond this number only probes are answered."""


class UnknownFields(Enum):
    """The answer to a field that is neither known nor refused by name."""

    IGNORE = "ignore"  # and count
    REFUSE = "forbid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """Parsers of replies, as --tool-call-parser and --reasoning-parser name them."""

    tool_calls: str = "auto"
    reasoning: str = "auto"


class Served(NamedTuple):
    """One of several models."""

    engine: Engine
    parsers: Parsers
    place: "YardPlace | None" = None
    """Its place among models that come and go; None if it stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One for each model of an application; they share all but the engine and the parsers."""

    engine: Engine
    metrics: HttpMetrics
    patience: ClientTimeouts
    unknown_fields: UnknownFields = UnknownFields.IGNORE
    parsers: Parsers = Parsers()
    spans: Spans = field(default_factory=NoSpans)
    place: "YardPlace | None" = None
    """Its place among models that come and go; None if it stays."""

    @property
    def takes_pictures(self) -> bool:
        """Whether the model reads pictures, and this server takes and decodes them."""
        return self.engine.info.vision is not None and self.engine.pictures.takes_any


CHOSEN = "tokenyard.edge"
"""The scope's entry with the edge of the model that the request names (served_models.py)."""


def edge_of(request: Request) -> Edge:
    """Return the edge of the request's model; of the first, until it has named one."""
    return cast(Edge, request.scope.get(CHOSEN) or request.app.state.edge)
