"""Wire requests to engine requests: the one place that judges what a request means for this model.

Owns: defaults, names of models, token ranges, the context window, and what excludes what.
Never: types and bounds (protocol.py), tokenization (the engine), chance: seeds are drawn by the caller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from engine.errors import ContextLengthExceeded, RequestRejected
from engine.types import (
    ChatOptions,
    GenerationRequest,
    ModelInfo,
    SamplingParams,
    ServiceTerms,
    TimeLimits,
)
from server.errors import ModelNotFound
from server.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    GenerationFields,
    Prompt,
)
from server.refusals import unsupported

MAX_CHOICES = 1024
"""Prompts times n: what one HTTP request may make the engine hold at once."""
MAX_CHARS_PER_TOKEN = 256
"""No tokenizer in use has longer tokens, so that a text of more characters than this allows cannot fit."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
_SEED_MASK = 2**64 - 1

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a request inherits from the call that brought it, rather than from its body."""

    reply_id: str
    """The id of the reply; engine request ids are made from it."""
    draw_seed: Callable[[], int]
    """Draws 64 bits for a request that brings no seed."""
    tenant: str | None = None
    """As the key or a header tells; None: the field `user` does."""


def completion_prompts(body: CompletionRequest, info: ModelInfo) -> tuple[Prompt, ...]:
    """Check all that can be checked before tokenization, and return the prompts."""
    _check_fields(body, info)
    num_choices = len(body.prompt) * (body.n or 1)
    if num_choices > MAX_CHOICES:
        raise RequestRejected(f"prompts times n must be at most {MAX_CHOICES}, not {num_choices}", param="n")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "best_of is supported only where it equals n")
    for prompt in body.prompt:
        _check_prompt(body, prompt, info)
    return body.prompt


def _check_prompt(body: CompletionRequest, prompt: Prompt, info: ModelInfo) -> None:
    if isinstance(prompt, str):
        _check_num_chars(len(prompt), info, param="prompt")
    elif body.echo:
        raise unsupported("echo", "echo is supported for prompts that are text, not token ids")
    if body.echo and body.logprobs is not None:
        raise unsupported("logprobs", "logprobs of the prompt are not supported: leave out echo or logprobs")


def completion_requests(
    body: CompletionRequest, prompts: Sequence[tuple[int, ...]], info: ModelInfo, origin: Origin
) -> tuple[GenerationRequest, ...]:
    """One engine request for each tokenized prompt. Raises RequestRejected."""
    requests = []
    for index, prompt in enumerate(prompts):
        max_tokens = _fit_max_tokens(
            body.max_tokens, len(prompt), info, names=_COMPLETION_NAMES, default=COMPLETION_MAX_TOKENS
        )
        _check_ids(prompt, info, param="prompt")
        params = _sampling(body, info, origin, max_tokens=max_tokens, num_logprobs=body.logprobs)
        requests.append(_generation_request(body, prompt, params, origin, place=f"-{index}"))
    return tuple(requests)


def chat_messages(body: ChatCompletionRequest, info: ModelInfo) -> list[dict[str, Any]]:
    """Check all that can be checked before the template is rendered; return the messages for it."""
    _check_fields(body, info)
    if body.top_logprobs and not body.logprobs:
        raise RequestRejected("top_logprobs needs logprobs to be true", param="top_logprobs")
    messages = [_message(message, index) for index, message in enumerate(body.messages)]
    _check_num_chars(sum(len(message["content"]) for message in messages), info, param="messages")
    return messages


def chat_options(body: ChatCompletionRequest) -> ChatOptions:
    """How the template is to end. Raises RequestRejected."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise RequestRejected(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    answers = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return ChatOptions(
        add_generation_prompt=answers,
        continue_final_message=continues,
        template_kwargs=dict(body.chat_template_kwargs or {}),
    )


def chat_request(
    body: ChatCompletionRequest, prompt: tuple[int, ...], info: ModelInfo, origin: Origin
) -> GenerationRequest:
    """Raises RequestRejected."""
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens is not None and body.max_tokens != asked:
        raise RequestRejected(
            "max_tokens and max_completion_tokens contradict each other", param="max_tokens"
        )
    max_tokens = _fit_max_tokens(asked, len(prompt), info, names=_CHAT_NAMES, default=None)
    _check_ids(prompt, info, param="messages")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _sampling(body, info, origin, max_tokens=max_tokens, num_logprobs=num_logprobs)
    return _generation_request(body, prompt, params, origin)


def _message(message: ChatMessage, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise unsupported(
            f"{where}.role", f"the role {message.role!r} is not supported; use system, user or assistant"
        )
    for name in ("tool_calls", "function_call", "audio", "refusal"):
        if getattr(message, name):
            raise unsupported(f"{where}.{name}", f"{name} in a message is not supported by this server")
    if message.content is None:
        raise RequestRejected(f"{where}.content is required", param=f"{where}.content", code="missing_field")
    texts = [_part_text(part, f"{where}.content[{place}]") for place, part in enumerate(message.content)]
    rendered = {"role": role, "content": "\n".join(texts)}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _part_text(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise unsupported(f"{where}.type", f"content parts of type {part.type!r} are not supported; use text")
    if part.text is None:
        raise RequestRejected(f"{where}.text is required", param=f"{where}.text", code="missing_field")
    return part.text


def _check_fields(body: GenerationFields, info: ModelInfo) -> None:
    if body.model is not None and body.model not in info.served_names:
        names = ", ".join(info.served_names)
        raise ModelNotFound(f"the model {body.model!r} is not served here; there is: {names}")
    if body.stream_options is not None and not body.stream:
        raise RequestRejected("stream_options is allowed only with stream", param="stream_options")
    if any(token_id >= info.vocab_size for token_id in body.stop_token_ids or ()):
        raise RequestRejected(f"token ids must be from 0 to {info.vocab_size - 1}", param="stop_token_ids")


def _check_ids(prompt: Sequence[int], info: ModelInfo, *, param: str) -> None:
    """Refuse ids that the model has no embedding for; a tokenizer may know more tokens than the model."""
    if min(prompt) < 0 or max(prompt) >= info.vocab_size:
        raise RequestRejected(f"token ids must be from 0 to {info.vocab_size - 1}", param=param)


def _check_num_chars(num_chars: int, info: ModelInfo, *, param: str) -> None:
    """Refuse what can never fit before the tokenizer spends seconds on it."""
    limit = info.max_model_len * MAX_CHARS_PER_TOKEN
    if num_chars > limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_chars} characters; no text of more than {limit} fits the context window"
            f" of {info.max_model_len} tokens",
            param=param,
        )


@dataclass(frozen=True, slots=True)
class _Names:
    """How an endpoint calls the two parts of the context window."""

    prompt: str
    max_tokens: str


_COMPLETION_NAMES = _Names("prompt", "max_tokens")
_CHAT_NAMES = _Names("messages", "max_completion_tokens")


def _fit_max_tokens(
    asked: int | None, num_prompt_tokens: int, info: ModelInfo, *, names: _Names, default: int | None
) -> int:
    """What is asked must fit; a default is cut to the room there is."""
    if num_prompt_tokens == 0:
        raise RequestRejected("the prompt is empty: this model needs at least one token", param=names.prompt)
    room = info.max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens; the context window is {info.max_model_len} tokens"
            " and must hold the reply as well",
            param=names.prompt,
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and {names.max_tokens} asks for {asked} more:"
            f" together more than the context window of {info.max_model_len} tokens",
            param=names.max_tokens,
        )
    return asked


def _sampling(
    body: GenerationFields, info: ModelInfo, origin: Origin, *, max_tokens: int, num_logprobs: int | None
) -> SamplingParams:
    """The request's word first, then the checkpoint's generation config, then OpenAI's default."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestRejected(f"min_tokens must be at most max_tokens, {max_tokens}", param="min_tokens")
    default = info.default_sampling
    top_k = int(_first(body.top_k, default.get("top_k"), 0))
    return SamplingParams(
        temperature=_first(body.temperature, default.get("temperature"), 1.0),
        top_p=_first(body.top_p, default.get("top_p"), 1.0),
        top_k=top_k if 0 < top_k < info.vocab_size else 0,
        min_p=_first(body.min_p, default.get("min_p"), 0.0),
        repetition_penalty=_first(body.repetition_penalty, default.get("repetition_penalty"), 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body, info),
        seed=origin.draw_seed() if body.seed is None else body.seed & _SEED_MASK,
        num_logprobs=num_logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=_stop_token_ids(body, info),
    )


def _first(asked: float | None, models: float | None, default: float) -> float:
    if asked is not None:
        return asked
    return default if models is None else models


def _stop_token_ids(body: GenerationFields, info: ModelInfo) -> tuple[int, ...]:
    model_ids = () if body.ignore_eos else info.eos_token_ids
    return tuple(dict.fromkeys((*model_ids, *(body.stop_token_ids or ()))))


def _logit_bias(body: GenerationFields, info: ModelInfo) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in (body.logit_bias or {}).items():
        # int() would also take "1_0", " 1" and other alphabets' digits.
        is_id = key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < info.vocab_size
        if not is_id:
            raise RequestRejected(
                f"the keys of logit_bias must be token ids from 0 to {info.vocab_size - 1}, as strings",
                param="logit_bias",
            )
        biases[int(key)] = float(bias)
    return tuple(sorted(biases.items()))


def _generation_request(
    body: GenerationFields,
    prompt: tuple[int, ...],
    params: SamplingParams,
    origin: Origin,
    *,
    place: str = "",
) -> GenerationRequest:
    return GenerationRequest(
        request_id=origin.reply_id + place,
        prompt_token_ids=prompt,
        params=params,
        n=body.n or 1,
        stop=tuple(body.stop or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        terms=_terms(body, origin),
    )


def _terms(body: GenerationFields, origin: Origin) -> ServiceTerms:
    return ServiceTerms(
        priority=body.priority or 0,
        tenant=(body.user or "") if origin.tenant is None else origin.tenant,
        cache_salt=body.cache_salt or "",
        time_limits=TimeLimits(
            queue_s=_or_no_limit(body.queue_timeout),
            first_token_s=_or_no_limit(body.first_token_timeout),
            total_s=_or_no_limit(body.timeout),
        ),
    )


def _or_no_limit(seconds: float | None) -> float:
    return inf if seconds is None else seconds
