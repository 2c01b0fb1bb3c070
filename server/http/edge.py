"""The edge: the objects that every route uses, kept in the state of the application.

Owns: the types under which server/ sees the engine and the settings; AsyncEngine and the fake engine of the
tests both fit `Engine`.
Never: behaviour.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, cast

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from engine.options.edge_config import EdgeConfig
from engine.text.tokenizer import SpecialTokens
from engine.types import (
    ChatOptions,
    EngineLoad,
    GenerationRequest,
    Grammar,
    Health,
    ModelInfo,
    Page,
    PooledOutput,
    PoolingRequest,
    QueueForecast,
    ServiceTerms,
    TextCut,
    TokenizedText,
    TokenOutput,
    TokenText,
)
from server.http.listening import num_connections_allowed
from server.observe.http_metrics import HttpMetrics
from server.observe.spans import NoSpans, Spans

NumberedOutputs = AsyncGenerator[tuple[int, TokenOutput], None]
"""Each output with the place of its request among those of one HTTP request."""


class HasRegistry(Protocol):
    """The engine's metrics, as far as the edge needs them."""

    @property
    def registry(self) -> CollectorRegistry: ...

    def look(self) -> None:
        """Set the gauges that follow from the state of this moment."""


class Engine(Protocol):
    """The methods of engine.frontend.client.AsyncEngine that the server calls; it documents them."""

    @property
    def metrics(self) -> HasRegistry: ...
    @property
    def info(self) -> ModelInfo: ...
    def health(self) -> Health: ...
    def load(self) -> EngineLoad: ...

    # Text.
    async def encode(self, text: str) -> tuple[int, ...]: ...
    async def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> tuple[int, ...]: ...
    async def encode_plain(self, text: str) -> tuple[int, ...]: ...
    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]: ...
    async def encode_infill(self, prefix: str, suffix: str) -> tuple[int, ...]: ...
    async def encode_texts(self, texts: Sequence[str], cut: TextCut) -> list[TokenizedText]: ...
    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], cut: TextCut) -> list[TokenizedText]: ...
    async def decode(self, token_ids: Sequence[int], special: SpecialTokens) -> str: ...
    def token_text(self, token_id: int) -> TokenText: ...
    async def vocabulary_strings(self, token_ids: Sequence[int]) -> list[str]: ...
    async def compile_grammar(self, grammar: Grammar, *, param: str, num_choices: int) -> Grammar: ...

    # Work.
    def require_room(self, priority: int | None) -> None: ...
    def forecast(self, terms: ServiceTerms) -> QueueForecast: ...
    def generate_all(self, requests: Sequence[GenerationRequest]) -> NumberedOutputs: ...
    async def pool_all(self, requests: Sequence[PoolingRequest]) -> list[PooledOutput]: ...

    # Operators.
    async def explain(self, page: Page) -> tuple[list[dict[str, Any]], int]: ...
    def watch(self) -> AsyncGenerator[bytes, None]: ...
    def reset_prefix_cache(self) -> None: ...


class EdgeSettings(Protocol):
    """The fields of engine.options.engine_config.ServerConfig that the edge reads; it documents them."""

    @property
    def api_keys(self) -> Sequence[str]: ...
    @property
    def edge(self) -> EdgeConfig: ...
    @property
    def max_body_bytes(self) -> int: ...
    @property
    def strict_fields(self) -> bool: ...
    @property
    def responses_store_size(self) -> int: ...
    @property
    def responses_store_bytes(self) -> int: ...
    @property
    def responses_store_ttl_s(self) -> float: ...
    @property
    def tool_call_parser(self) -> str: ...
    @property
    def reasoning_parser(self) -> str: ...
    @property
    def enable_admin(self) -> bool: ...
    @property
    def shown_options(self) -> Mapping[str, Mapping[str, Any]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One for each application."""

    engine: Engine
    metrics: HttpMetrics
    patience: Patience
    unknown_fields: UnknownFields = UnknownFields.IGNORE
    parsers: Parsers = Parsers()
    spans: Spans = field(default_factory=NoSpans)


def edge_of(request: Request) -> Edge:
    return cast(Edge, request.app.state.edge)
