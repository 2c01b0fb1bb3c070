"""Fields of request bodies that several endpoints share, as OpenAI and other local servers document them.

Owns: the type and the bounds of each of them. A null is an absent field everywhere.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints

from server.edge.wire_model import WireModel, wrong_shape
from server.reply.generate.structured_output import ResponseFormat, StructuredOutputsField

MAX_PROMPTS = 128
MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_TEMPLATE_KWARGS = 32
MAX_TEXT_CHARS = 64 * 1024 * 1024
"""Texts end where the body does; the number is there so that no field is without a bound."""
MAX_PROMPT_TOKENS = 16 * 1024 * 1024
INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

Prompt = str | tuple[int, ...]


def as_prompts(value: Any, *, most: int = MAX_PROMPTS, noun: str = "prompts") -> tuple[Prompt, ...]:
    """Distinguish the four shapes of a prompt by hand: a union would report an error for each of them."""
    prompts = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not prompts:
        raise wrong_shape("must not be an empty list")
    if len(prompts) > most:
        raise wrong_shape(f"must have at most {most} {noun}, not {len(prompts)}")
    return tuple(_as_prompt(prompt) for prompt in prompts)


def _as_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and _is_ids(value):
        return tuple(value)
    raise wrong_shape(
        "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )


def _is_ids(value: list[Any]) -> bool:
    # True is an int to isinstance; in a prompt it is a mistake.
    return bool(value) and set(map(type, value)) == {int}


def _as_stop_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value] if value else []  # as OpenAI: nothing to stop at
    return value


def _without_nulls(value: Any) -> Any:
    """Leave out members that are null, as clients send those that they do not use."""
    is_object = isinstance(value, dict)
    return {name: each for name, each in value.items() if each is not None} if is_object else value


def _at_most(limit: int) -> Callable[[Any], Any]:
    """Count the keys of an object before its values are looked at, and reported one by one."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise wrong_shape(f"at most {limit} entries are allowed, not {len(value)}")
        return value

    return check


TokenIdList = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]
_PromptShapes = (
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | TokenIdList
    | Annotated[list[TokenIdList], Field(min_length=1, max_length=MAX_PROMPTS)]
)
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(as_prompts, json_schema_input_type=_PromptShapes)]

_StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    list[_StopString],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(
        _as_stop_list,
        json_schema_input_type=Annotated[str, StringConstraints(max_length=MAX_STOP_CHARS)]
        | Annotated[list[_StopString], Field(max_length=MAX_STOPS)],
    ),
]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIASES),
    BeforeValidator(_at_most(MAX_LOGIT_BIASES)),
]
_TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
StopTokenIds = Annotated[list[_TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
AllowedTokenIds = Annotated[
    list[_TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)
]
LogprobTokenIds = Annotated[
    list[_TokenId], Field(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS, fail_fast=True)
]
BadWords = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
    Field(max_length=MAX_BAD_WORDS, fail_fast=True),
]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TemplateKwargs = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)]
_MetadataValue = Annotated[str, StringConstraints(max_length=512)]
_WithNulls = Annotated[dict[str, _MetadataValue | None], Field(max_length=16)]
Metadata = Annotated[
    dict[str, _MetadataValue],
    Field(max_length=16),
    BeforeValidator(_without_nulls, json_schema_input_type=_WithNulls),
    BeforeValidator(_at_most(16)),
]
Name = Annotated[str, StringConstraints(max_length=256)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
NumTokens = Annotated[int, Field(ge=1, le=INT32_MAX)]
TopP = Annotated[float, Field(ge=0, le=1)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _check_seed(value: Any) -> Any:
    """Name both bounds: the validator would name the one that was missed."""
    if isinstance(value, int) and not -_INT64_MAX - 1 <= value <= _INT64_MAX:
        raise wrong_shape(f"must be from {-_INT64_MAX - 1} to {_INT64_MAX}, not {value}")
    return value


Seed = Annotated[int, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX), BeforeValidator(_check_seed)]


class StreamOptions(WireModel):
    include_usage: bool | None = None
    """One more chunk before [DONE], without choices, with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk, unless include_usage is false."""


class ServiceFields(WireModel):
    """Model and terms of service; every endpoint that computes understands them."""

    model: Name | None = None
    """A served name; absent: the first one."""
    priority: Annotated[int, Field(ge=-INT32_MAX - 1, le=INT32_MAX)] | None = None
    """Lower is more urgent, as in nice(1); read under the priority policy."""
    timeout: Seconds | None = None
    """Seconds in all; then the text so far is the reply, with the reason `timeout`, or it is a 504."""
    queue_timeout: Seconds | None = None
    """Seconds to its first step; then it is answered with 504."""
    first_token_timeout: Seconds | None = None
    """Seconds to its first token; then it is answered with 504."""
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """Cached prefixes are shared only among requests with the same salt."""

    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    """The tenant, if tenants are treated fairly and neither a key nor a header names it."""

    @property
    def default_priority(self) -> int:
        """Priority of a request that asks for none."""
        return 0

    @property
    def needs_model(self) -> bool:
        """Whether the model is loaded for it."""
        return True

    @property
    def streams_events(self) -> bool:
        """Whether the reply is a stream of server-sent events."""
        return getattr(self, "stream", None) is True


class SamplingNumbers(WireModel):
    """Sampling parameters; every endpoint that generates understands them."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    """0 keeps the most likely token alone."""
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """0 and -1 keep all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None


class SamplingFields(SamplingNumbers, ServiceFields):
    """Fields of every endpoint that generates, but for those of other servers in their words."""

    # Accepted without effect, since nothing in a reply depends on them here (a test lists them).
    metadata: Metadata | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=512)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None


WITHOUT_EFFECT = frozenset({"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Sampling fields that are accepted and change nothing in a reply."""


class GenerationFields(SamplingFields):
    """Fields that completions and chat completions share."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    """Token ids, as strings, to numbers that are added to their logits."""
    bad_words: BadWords | None = None
    """Never generated, at the beginning of a text or after a space."""
    allowed_token_ids: AllowedTokenIds | None = None
    """Only these are sampled."""
    response_format: ResponseFormat | None = None
    """Text, any JSON object, or JSON that matches a schema."""
    structured_outputs: StructuredOutputsField | None = None
    """Text that matches a schema, a regular expression, one of several choices, or a grammar."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Keep that many tokens of the prompt; -1: as many as leave room for max_tokens."""
    truncation_side: Literal["left", "right"] | None = None
    """The end of the prompt at which truncate_prompt_tokens cuts; left if absent."""
    prompt_logprobs: NumLogprobs | None = None
    """Number of alternatives for each token of the prompt."""
    logprob_token_ids: LogprobTokenIds | None = None
    """Tokens whose log-probabilities are reported in place of the likeliest ones; needs logprobs."""
    include_metrics: bool | None = None
    """Return the times of the request with its reply; only of one choice of one prompt."""
    return_token_ids: bool | None = None
    """Return the token ids of prompt and reply."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens `token_id:123` in logprobs, instead of by their text."""
