"""What every route holds: the engine's face, the counters, the patience with clients.

Owns: the names under which server/ sees the rest of the program. engine.client.AsyncEngine and the fake
engine of the tests both fit `Engine`.
Never: behaviour.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from engine.types import ChatOptions, GenerationRequest, Health, ModelInfo, TokenOutput
from server.http_metrics import HttpMetrics
from server.listening import num_connections_allowed

NumberedOutputs = AsyncGenerator[tuple[int, TokenOutput], None]
"""Each output with the place of its request among those of one HTTP request."""


class HasRegistry(Protocol):
    """The engine's metrics, as far as the edge cares."""

    @property
    def registry(self) -> CollectorRegistry: ...


class Engine(Protocol):
    """The face of the engine in the API process."""

    @property
    def metrics(self) -> HasRegistry: ...

    @property
    def info(self) -> ModelInfo:
        """Raises EngineUnavailable until the model is loaded."""
        ...

    def health(self) -> Health:
        """Never blocks."""
        ...

    async def encode(self, text: str) -> tuple[int, ...]:
        """Tokenize a plain prompt off the event loop. Raises RequestRejected."""
        ...

    async def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> tuple[int, ...]:
        """Render the chat template and tokenize. Raises RequestRejected, NoChatTemplate."""
        ...

    async def explain(self) -> list[dict[str, Any]]:
        """Every live sequence, and why it waits. Raises EngineUnavailable."""
        ...

    def reset_prefix_cache(self) -> None:
        """Raises EngineUnavailable."""
        ...

    def generate_all(self, requests: Sequence[GenerationRequest]) -> NumberedOutputs:
        """Admit all or none at the first step of the iteration; closing the iterator aborts them."""
        ...


class EdgeSettings(Protocol):
    """What the operator decides about the edge; engine.config.ServerConfig fits."""

    @property
    def api_keys(self) -> Sequence[str]:
        """Empty: everybody may ask."""
        ...

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def enable_admin(self) -> bool:
        """Whether /admin/requests is there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the edge waits for clients, and for how many."""

    keep_alive_s: float = 15.0
    """Silence after which a comment line is sent, so that no proxy takes the stream for dead."""
    send_timeout_s: float = 30.0
    """How long a client may leave its socket full before its request is aborted."""
    head_timeout_s: float = 30.0
    """From a connection, or from the first byte of a further request, to the end of the request's head."""
    max_connections: int = field(default_factory=num_connections_allowed)
    """Beyond them only probes are answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Kept in the state of the application."""

    engine: Engine
    metrics: HttpMetrics
    patience: Patience


def edge_of(request: Request) -> Edge:
    return cast(Edge, request.app.state.edge)
