"""What every route holds: the engine's face, the counters, the patience with clients.

Owns: the names under which server/ sees the rest of the program. AsyncEngine and the fake
engine of the tests both fit `Engine`.
Never: behaviour.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, cast

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from engine.options.edge_config import EdgeConfig
from engine.text.tokenizer import SpecialTokens
from engine.types import (
    ChatOptions,
    GenerationRequest,
    Grammar,
    Health,
    ModelInfo,
    PooledOutput,
    PoolingRequest,
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

    async def encode_plain(self, text: str) -> tuple[int, ...]:
        """Tokenize without the special tokens around it. Raises RequestRejected."""
        ...

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Bad words as token sequences. Raises RequestRejected."""
        ...

    async def encode_infill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        """Tokenize a prompt with a hole. Raises RequestRejected."""
        ...

    async def decode(self, token_ids: Sequence[int], special: SpecialTokens) -> str:
        """Text of whole sequences, off the event loop."""
        ...

    def token_text(self, token_id: int) -> TokenText:
        """How one token looks in the middle of a text."""
        ...

    async def vocabulary_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the tokenizer spells them, off the event loop."""
        ...

    async def compile_grammar(self, grammar: Grammar, *, param: str, num_choices: int) -> Grammar:
        """Try a grammar that came in the field `param`. Raises RequestRejected, Overloaded."""
        ...

    async def explain(self) -> list[dict[str, Any]]:
        """Every live sequence, and why it waits. Raises EngineUnavailable."""
        ...

    def reset_prefix_cache(self) -> None:
        """Raises EngineUnavailable."""
        ...

    async def encode_texts(self, texts: Sequence[str], cut: TextCut) -> list[TokenizedText]:
        """Tokenize for a model that pools, off the event loop. Raises RequestRejected."""
        ...

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], cut: TextCut) -> list[TokenizedText]:
        """Tokenize each pair as one prompt. Raises RequestRejected."""
        ...

    async def pool_all(self, requests: Sequence[PoolingRequest]) -> list[PooledOutput]:
        """Admit all or none; cancelling the call aborts them. Raises WrongTask for a model that generates."""
        ...

    def require_room(self, priority: int | None) -> None:
        """Raises Overloaded for a call that would find no place in the queue; None is any priority."""
        ...

    def generate_all(self, requests: Sequence[GenerationRequest]) -> NumberedOutputs:
        """Admit all or none at the first step of the iteration; closing the iterator aborts them."""
        ...


class EdgeSettings(Protocol):
    """What the operator decides about the edge; engine.options.engine_config.ServerConfig fits."""

    @property
    def api_keys(self) -> Sequence[str]:
        """Empty: everybody may ask."""
        ...

    @property
    def edge(self) -> EdgeConfig:
        """Who may ask, and over what."""
        ...

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def strict_fields(self) -> bool:
        """Whether a field that nobody knows is refused."""
        ...

    @property
    def responses_store_size(self) -> int:
        """Responses that can be asked for again; 0 stores none."""
        ...

    @property
    def responses_store_bytes(self) -> int: ...

    @property
    def responses_store_ttl_s(self) -> float:
        """Since the last use."""
        ...

    @property
    def tool_call_parser(self) -> str:
        """A word of --tool-call-parser."""
        ...

    @property
    def reasoning_parser(self) -> str:
        """A word of --reasoning-parser."""
        ...

    @property
    def enable_admin(self) -> bool:
        """Whether /admin/requests is there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the edge waits for clients, and for how many."""

    keep_alive_s: float = 15.0
    """Silence after which a comment line is sent, so that no proxy takes the stream for dead; 0: never."""
    send_timeout_s: float = 30.0
    """How long a client may leave its socket full before its request is aborted."""
    head_timeout_s: float = 10.0
    """From a connection, or from the first byte of a further request, to the end of the request's head."""
    max_connections: int = field(default_factory=num_connections_allowed)
    """Beyond them only probes are answered."""


class UnknownFields(Enum):
    """What becomes of a field that nobody knows."""

    IGNORE = "ignore"  # and count
    REFUSE = "forbid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """How replies are read; the words of the two options."""

    tool_calls: str = "auto"
    reasoning: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Kept in the state of the application."""

    engine: Engine
    metrics: HttpMetrics
    patience: Patience
    unknown_fields: UnknownFields = UnknownFields.IGNORE
    parsers: Parsers = Parsers()
    spans: Spans = field(default_factory=NoSpans)


def edge_of(request: Request) -> Edge:
    return cast(Edge, request.app.state.edge)
