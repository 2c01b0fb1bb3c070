"""What the server hands to AsyncEngine and what it gets back.

Owns: the vocabulary of the public face. Text, choices and usage live here; blocks and steps do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from engine.journal import Journal
from scheduler.messages import (
    FinishReason,
    Grammar,
    GrammarKind,
    PoolingParams,
    PoolingTask,
    PromptComputation,
    SamplingParams,
    ServiceTerms,
    TimeLimits,
)
from worker.worker_config import PoolingFacts

__all__ = [
    "ChatOptions",
    "EngineState",
    "FinishReason",
    "GenerationRequest",
    "Grammar",
    "GrammarKind",
    "Health",
    "LogprobEntry",
    "ModelInfo",
    "PooledOutput",
    "PoolingFacts",
    "PoolingParams",
    "PoolingRequest",
    "PoolingTask",
    "PromptComputation",
    "SamplingParams",
    "ServiceTerms",
    "TextCut",
    "TimeLimits",
    "TokenLogprob",
    "TokenOutput",
    "TokenText",
    "TokenizedText",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt, tokenized, and `n` independent continuations of it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    """Sequence i of n draws with seed + i."""
    n: int = 1
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings, wherever token borders fall."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens that are text even so: marks of tool calls and of reasoning."""
    terms: ServiceTerms = field(default_factory=ServiceTerms)
    max_tenant_tokens: int | None = None
    """Prompt tokens that its tenant may have waiting, these among them; None: as many as the queue takes."""
    journal: Journal = field(default_factory=Journal, compare=False, repr=False)
    """That of the HTTP request it came with; other requests may share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """One prompt, tokenized, of which the model makes one vector or score."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: PoolingParams
    terms: ServiceTerms = field(default_factory=ServiceTerms)
    max_tenant_tokens: int | None = None
    """As of GenerationRequest."""
    journal: Journal = field(default_factory=Journal, compare=False, repr=False)
    """As of GenerationRequest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledOutput:
    """The only output of a pooling request."""

    vector: bytes
    """Float32, little-endian."""
    finish_reason: FinishReason
    """STOP; or ABORTED, without a vector. The rest are raised."""
    num_cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCut:
    """How long a text may be that a model pools."""

    param: str
    """The field of the request that the text came in."""
    max_tokens: int | None = None
    """Cut to so many, special tokens included, at its end; None leaves it whole."""


class TokenizedText(NamedTuple):
    """A text, or a pair of texts, for a model that pools."""

    token_ids: tuple[int, ...]
    second_text_start: int | None = None
    """Where tokens of type 1 begin, as the tokenizer numbers the second text of a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEntry:
    """One candidate token with its log-probability."""

    token_id: int
    token: str
    """Its text alone; U+FFFD where its bytes are not whole characters."""
    token_bytes: bytes
    logprob: float


class TokenText(NamedTuple):
    """How one token looks."""

    token_id: int
    token: str
    """Its text alone; U+FFFD where its bytes are not whole characters."""
    token_bytes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The chosen token and the alternatives, best first."""

    chosen: LogprobEntry
    top: tuple[LogprobEntry, ...]
    rank: int = 1
    """Of the chosen token; 1 is the most likely."""
    is_hidden: bool = False
    """The chosen token was left out of the text: a special token."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What was added to one choice since the last output of that choice.

    A slow reader gets several steps merged into one. The texts of a choice, joined, are its whole
    text: never broken UTF-8, never a part of a stop string.

    A struct because one is built per token: a frozen dataclass of so many fields takes ten times as long.
    """

    index: int
    """Which of the n choices."""
    text: str
    token_ids: tuple[int, ...]
    """All tokens so far that were not reported yet; their text may still be held back."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, if the request asked for them."""
    finish_reason: FinishReason | None = None
    """STOP, LENGTH, ABORTED or EXPIRED, with the last output of the choice; the rest are raised."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the choice; None for the end-of-sequence token."""
    num_cached_tokens: int = 0
    """Of the prompt, found in the prefix cache; the same in every output of a choice."""
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """Of the prompt's tokens from the second on, with the first output of a choice, if asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered by the model's chat template."""

    add_generation_prompt: bool = True
    """End with the header of the assistant's turn."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model goes on with it. Excludes add_generation_prompt."""
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the template, from the caller: `enable_thinking`, say. It must read each of them."""
    template_hints: dict[str, Any] = field(default_factory=dict)
    """Variables for a template that reads them; of no effect with one that does not."""


class EngineState(StrEnum):
    """Where the engine is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Judged by the engine's step counter, never by a test generation."""

    state: EngineState
    is_live: bool
    """The loop has moved within the heartbeat timeout."""
    detail: str
    """One line for a person: loading progress, the cause of death, how long the loop has stood still."""
    num_steps: int
    progress: float
    """Share of the model loaded, 0 to 1."""

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY and self.is_live


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What was really loaded, known once the engine is ready."""

    served_names: tuple[str, ...]
    """The first is the one reported in replies; all are accepted."""
    model_type: str
    num_parameters: int
    dtype: str
    device: str
    """For a person: `cpu (2 threads)`, `NVIDIA H100 80GB HBM3`."""
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    """Blocks that sequences can use."""
    kv_cache_bytes: int
    eos_token_ids: tuple[int, ...]
    is_paged: bool = True
    """False: each sequence has a cache of its own and is computed alone; no prefix is found again."""
    default_sampling: dict[str, float] = field(default_factory=dict)
    """From generation_config.json, where it sets them: temperature, top_p, top_k, min_p, and
    repetition_penalty."""
    created_s: int = 0
    """Unix time at which it became ready."""
    has_chat_template: bool = False
    chat_template: str = ""
    """Its source; of several, the one that requests with tools get."""
    added_tokens: dict[str, int] = field(default_factory=dict)
    """Ids of the tokens that the tokenizer looks for before it splits a text: `<think>`, `<|im_end|>`."""
    pooling: PoolingFacts | None = None
    """What it makes of prompts instead of text; None: it generates."""
