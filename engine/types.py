"""The types that the server passes to AsyncEngine and gets back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from engine.journal import Journal
from scheduler.input_messages import AnswerStart as AnswerStart
from scheduler.input_messages import EncoderInput as EncoderInput
from scheduler.input_messages import Payload as Payload
from scheduler.messages import FinishReason as FinishReason
from scheduler.messages import Grammar as Grammar
from scheduler.messages import GrammarKind as GrammarKind
from scheduler.messages import PoolingParams as PoolingParams
from scheduler.messages import PoolingTask as PoolingTask
from scheduler.messages import PromptComputation as PromptComputation
from scheduler.messages import ReportPage as ReportPage
from scheduler.messages import SamplingParams as SamplingParams
from scheduler.messages import ServiceTerms as ServiceTerms
from scheduler.messages import TimeLimits as TimeLimits
from worker.worker_config import ModelFacts
from worker.worker_config import PoolingFacts as PoolingFacts
from worker.worker_config import VisionFacts as VisionFacts


class QueueForecast(NamedTuple):
    """Place that a request would have in the queue now."""

    num_ahead: int
    """Sequences that have not begun and would be served before it; with fairness others may come first."""
    expected_start_s: float | None
    """Seconds until those have begun, as fast as in the last ones; None if none has begun lately."""
    wait_reason: str
    """Reason why the queue waited last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter that requests may name."""

    name: str
    identity: str
    """Name and content: another content under the same name is another adapter."""
    folder: str
    rank: int
    created_s: int
    """Unix time at which it was loaded."""
    is_of_tower: bool = False
    """Whether it also updates a tower, which is not computed: its requests have no pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One tokenized prompt, for text or for a vector."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    terms: ServiceTerms = field(default_factory=ServiceTerms)
    max_tenant_tokens: int | None = None
    """Limit on the tenant's waiting prompt tokens, these included; None: only the queue's own limit."""
    journal: Journal = field(default_factory=Journal, compare=False, repr=False)
    """The journal of its HTTP request; other prompts of that request share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(EngineRequest):
    """One prompt, tokenized, and `n` independent continuations of it."""

    params: SamplingParams
    """Sequence i of n samples with seed + i."""
    n: int = 1
    stop: tuple[str, ...] = ()
    """Strings before which the text ends, wherever token borders fall."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens that are shown all the same: marks of tool calls and of reasoning."""
    prediction: tuple[int, ...] = ()
    """Text that the client expects, as tokens; a hint that changes no output."""
    restore_at: tuple[int, ...] = ()
    """Numbers of prompt tokens behind which later prompts will go on otherwise; a hint too."""
    adapter: ServedAdapter | None = None
    """Adapter to run the model with; None: the model alone."""
    encoder_inputs: tuple[EncoderInput, ...] = ()
    """Pictures in the order of their positions; the prompt has a token of the model's at each of these."""
    payloads: tuple[Payload, ...] = ()
    """Prepared bytes of the pictures, each content once, in shared memory until the request has ended: a file
    of safetensors, with the arguments of the model's `get_image_features` for one picture, by name."""
    at_end: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Called when the request is over; what it refers to is let go at the latest with the request itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest(EngineRequest):
    """One tokenized prompt, from which the model makes one vector or score."""

    params: PoolingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCut:
    """The limit on the length of a text for a pooling model."""

    param: str
    """The request field that holds the text, for error messages."""
    max_tokens: int | None = None
    """Tokens to keep, special ones included; the end is cut off. None keeps the whole text."""


class TokenizedText(NamedTuple):
    """A tokenized text, or pair of texts, for a pooling model."""

    token_ids: tuple[int, ...]
    second_text_start: int | None = None
    """Index of the first token of type 1, which is where the second text of a pair begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEntry:
    """One candidate token with its log-probability."""

    token_id: int
    token: str
    """The token's own text, with U+FFFD where its bytes are not whole characters."""
    token_bytes: bytes
    logprob: float


class TokenText(NamedTuple):
    token_id: int
    token: str
    """The token's own text, with U+FFFD where its bytes are not whole characters."""
    token_bytes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLogprob:
    """The chosen token and the alternatives, best first."""

    chosen: LogprobEntry
    top: tuple[LogprobEntry, ...]
    rank: int = 1
    """Rank of the chosen token; 1 is the most likely."""
    is_hidden: bool = False
    """Whether the chosen token is a special token that the text leaves out."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one choice since the last output of that choice.

    Several steps are merged into one output for a slow reader. The texts of a choice, joined, are its whole
    text: never broken UTF-8, never a part of a stop string.

    A struct, because one is built per token: a frozen dataclass with these fields takes ten times as long.
    """

    index: int
    """Index of the choice, from 0 to n - 1."""
    text: str
    token_ids: tuple[int, ...]
    """Tokens not reported before; their text may still be held back."""
    logprobs: tuple[ChosenLogprob, ...] = ()
    """One for each of `token_ids`, if the request asked for them."""
    finish_reason: FinishReason | None = None
    """STOP, LENGTH or EXPIRED, in the last output of the choice. Other ends are raised as errors."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the choice; None for the end-of-sequence token."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; the same in every output of a choice."""
    num_kept_tokens: int = 0
    """Prompt tokens that later prompts find; as before."""
    num_accepted_prediction: int = 0
    """Tokens of the request's prediction that this output has."""
    num_rejected_prediction: int = 0
    """Tokens of it that were verified in vain."""
    prompt_logprobs: Sequence[ChosenLogprob] = ()
    """One for each prompt token from the second on, in the first output of a choice, if asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The work that the engine has now."""

    num_requests: int
    """Requests that are admitted and not over."""
    num_waiting: int
    """Sequences that wait for a place or for memory."""
    kv_cache_usage: float
    """Share of the blocks in use, 0 to 1."""


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The engine's health, judged by its step counter and never by a test generation."""

    state: EngineState
    is_live: bool
    """Whether the loop has moved within the heartbeat timeout."""
    detail: str
    """One line for people: loading progress, the cause of death, how long the loop has stood still."""
    num_steps: int
    progress: float
    """Loaded share of the model, 0 to 1."""
    is_given_up: bool = False
    """Whether no engine process will be started any more."""
    is_optional: bool = False
    """Whether the server is ready without this model, which is loaded when it is asked for."""

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY and self.is_live

    @property
    def is_welcoming(self) -> bool:
        """Whether requests are served: those for an optional model once they have waited for it."""
        comes = self.is_optional and not self.is_given_up and self.state is not EngineState.DRAINING
        return self.is_ready or (comes and self.is_live)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A further name of a model, whose requests have defaults of their own."""

    name: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""


class ModelNames(NamedTuple):
    """Names of one model, loaded or not."""

    served: tuple[str, ...]
    """Its own; replies report the first."""
    patterns: tuple[str, ...] = ()
    """Further accepted names, each with one `*` for any text; no list has them."""
    variants: tuple[str, ...] = ()
    """Names of its profiles and its adapters; replies report the one that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo(ModelFacts):
    """The loaded model and how it is served; known once the engine is ready."""

    served_names: tuple[str, ...]
    """Accepted names; replies report the first."""
    name_patterns: tuple[str, ...] = ()
    """Further accepted names, each with one `*` for any text; no list has them."""
    created_s: int = 0
    """Unix time at which it became ready."""
    has_chat_template: bool = False
    chat_template: str = ""
    """Source of the chat template; of several, the one for requests with tools."""
    template_variables: frozenset[str] = frozenset()
    """Names of `chat_template_kwargs` that have an effect."""
    response_template: str = ""
    """JSON text of the checkpoint's template for reading replies; empty without one."""
    added_tokens: dict[str, int] = field(default_factory=dict)
    """Ids of the tokens that the tokenizer finds before it splits a text: `<think>`, `<|im_end|>`."""
    served_adapters: tuple[ServedAdapter, ...] = ()
    """Adapters that requests may name in place of the model."""
    profiles: tuple[Profile, ...] = ()
    """The model with other defaults, likewise."""
    default_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template that requests may override."""

    def adapter_named(self, name: str | None) -> ServedAdapter | None:
        return next((adapter for adapter in self.served_adapters if adapter.name == name), None)

    def profile_named(self, name: str | None) -> Profile:
        """Return the profile of a name; one without defaults where the name means none."""
        return next((each for each in self.profiles if each.name == name), _NO_PROFILE)

    def sampling_of(self, name: str | None) -> dict[str, float]:
        """Return the defaults of sampling for requests by a name."""
        return {**self.default_sampling, **self.profile_named(name).sampling}

    def template_kwargs_of(self, name: str | None) -> dict[str, Any]:
        """Return the defaults of the chat template's variables, likewise, as far as it reads them."""
        defaults = {**self.default_template_kwargs, **self.profile_named(name).template_kwargs}
        return {key: value for key, value in defaults.items() if key in self.template_variables}

    def is_served(self, name: str) -> bool:
        """Tell whether requests may use a name: one of `names`, or one that fits a pattern."""
        return name in self.names or fits_any(name, self.name_patterns)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model, its profiles and its adapters."""
        return (*self.served_names, *self.variants)

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of its profiles and adapters."""
        profiles, adapters = self.profiles, self.served_adapters
        return (*(each.name for each in profiles), *(each.name for each in adapters))


_NO_PROFILE = Profile(name="")


def fits_any(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name is one of `patterns`, or fits one with a `*` for any text."""
    return any(name == each or ("*" in each and _fits(name, *each.split("*"))) for each in patterns)


def _fits(name: str, head: str, tail: str) -> bool:
    return len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail)
