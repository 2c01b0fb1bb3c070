"""Requests exactly as OpenAI documents them, and the extensions that other local servers share.

Owns: the type and the bounds of every field that has an effect. A null is an absent field everywhere.
Never: what needs the model to judge (translate.py), or fields we do not support (refusals.py).
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, StringConstraints
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 128
MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
MAX_TEMPLATE_KWARGS = 32
MAX_TEXT_CHARS = 64 * 1024 * 1024
"""Texts end where the body does; the number is there so that no field is without a bound."""
MAX_PROMPT_TOKENS = 16 * 1024 * 1024
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

Prompt = str | tuple[int, ...]


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong_shape", "{reason}", {"reason": message})


def _as_prompts(value: Any) -> tuple[Prompt, ...]:
    """Tell the four shapes of a prompt apart by hand: a union would report an error for each of them."""
    prompts = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not prompts:
        raise _wrong("must not be an empty list")
    if len(prompts) > MAX_PROMPTS:
        raise _wrong(f"at most {MAX_PROMPTS} prompts are allowed, not {len(prompts)}")
    return tuple(_as_prompt(prompt) for prompt in prompts)


def _as_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and _is_ids(value):
        return tuple(value)
    raise _wrong("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _is_ids(value: list[Any]) -> bool:
    # True is an int to isinstance; in a prompt it is a mistake.
    return bool(value) and set(map(type, value)) == {int}


def _as_stop_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value] if value else []  # as OpenAI: nothing to stop at
    return value


def _as_parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    raise _wrong("must be a string or a list of content parts")


def _at_most(limit: int) -> Callable[[Any], Any]:
    """Count the keys of an object before its values are looked at, and reported one by one."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise _wrong(f"at most {limit} entries are allowed, not {len(value)}")
        return value

    return check


_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
_Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]
_PromptShapes = (
    _Text
    | Annotated[list[_Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | _Ids
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
)
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_as_prompts, json_schema_input_type=_PromptShapes)]

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
StopTokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=_INT32_MAX)]], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
]
TemplateKwargs = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)]
Metadata = Annotated[
    dict[str, Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
    BeforeValidator(_at_most(16)),
]
Name = Annotated[str, StringConstraints(max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
NumTokens = Annotated[int, Field(ge=1, le=_INT32_MAX)]


class WireModel(BaseModel):
    """A JSON object from outside: no type is coerced, unknown keys are counted elsewhere."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(WireModel):
    include_usage: bool | None = None
    """One more chunk before [DONE], without choices, with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""


class GenerationFields(WireModel):
    """What both endpoints understand."""

    model: Name | None = None
    """A served name; absent: the first one."""
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = None
    """0 and -1 keep all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    """Token ids, as strings, to what is added to their logits."""
    seed: Annotated[int, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX)] | None = None
    priority: Annotated[int, Field(ge=-_INT32_MAX - 1, le=_INT32_MAX)] | None = None
    """Lower is more urgent, as in nice(1); read under the priority policy."""
    timeout: Seconds | None = None
    """In all, in seconds; then the request ends with what it has and finish reason `timeout`."""
    queue_timeout: Seconds | None = None
    """To its first step, in seconds; then it is answered with 504."""
    first_token_timeout: Seconds | None = None
    """To its first token, in seconds; then it is answered with 504."""
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """Cached prefixes are shared only among requests with the same salt."""

    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    """The tenant, if tenants are treated fairly and neither a key nor a header names it."""

    # Accepted without effect, since nothing in a reply depends on them here (refusals.py lists them too).
    metadata: Metadata | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=512)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None


class CompletionRequest(GenerationFields):
    """The body of POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    """Equal to n, or absent."""


class ContentPart(WireModel):
    type: Annotated[str, StringConstraints(max_length=64)]
    """Only `text` is understood."""
    text: _Text | None = None


_ContentShapes = _Text | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_CONTENT_PARTS)]


class ChatMessage(WireModel):
    role: Annotated[str, StringConstraints(max_length=64)]
    """system, developer (the same), user or assistant."""
    content: (
        Annotated[
            list[ContentPart],
            Field(min_length=1, max_length=MAX_CONTENT_PARTS, fail_fast=True),
            BeforeValidator(_as_parts, json_schema_input_type=_ContentShapes),
        ]
        | None
    ) = None
    name: Annotated[str, StringConstraints(max_length=64)] | None = None
    # Parts of an assistant's turn that a model without tools never wrote; refused by name if they are set.
    tool_calls: Annotated[list[Any], Field(max_length=128)] | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    refusal: _Text | None = None


class ChatCompletionRequest(GenerationFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: NumTokens | None = None
    """The newer name of max_tokens; one of the two, or both alike."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message instead of answering it."""
    chat_template_kwargs: TemplateKwargs | None = None
