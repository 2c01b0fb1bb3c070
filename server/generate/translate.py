"""Wire requests to engine requests: the one place that judges what a request means for this model.

Owns: defaults, names of models, token ranges, the context window, and what excludes what.
Never: types and bounds (protocol.py), tokenization (the engine), chance: seeds are drawn by the caller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from engine.errors import ContextLengthExceeded, RequestRejected, WrongTask
from engine.journal import Journal
from engine.options.api_keys import ApiKey
from engine.types import (
    ChatOptions,
    GenerationRequest,
    ModelInfo,
    SamplingParams,
    ServiceTerms,
    TimeLimits,
)
from server.error_replies import ModelNotFound, NotPermitted
from server.generate.chat_messages import num_chars, template_messages
from server.generate.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    Prompt,
    ServiceFields,
)

MAX_CHOICES = 1024
"""Prompts times n: what one HTTP request may make the engine hold at once."""
MAX_PROMPT_LOGPROBS = 2**20
"""Entries of a reply: tokens of all prompts, times choices, times alternatives and the token itself. Each is
some 50 bytes of JSON, and costs nothing to ask for."""
MAX_CHARS_PER_TOKEN = 256
"""No tokenizer in use has longer tokens, so that a text of more characters than this allows cannot fit."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""As Qwen's and DeepSeek's templates name the variable that turns reasoning off."""
_NO_REASONING = ("none", "minimal")
"""Efforts that leave a model no time to think, where all it has is a switch."""
BadWords = tuple[tuple[int, ...], ...]
"""As token sequences."""
_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a request inherits from the call that brought it, rather than from its body."""

    reply_id: str
    """The id of the reply; engine request ids are made from it."""
    draw_seed: Callable[[], int]
    """Draws 64 bits for a request that brings no seed."""
    tenant: str | None = None
    """As the key or a header tells; None: the field `user` does."""
    key: ApiKey | None = None
    """What it may ask for; None: everything."""
    journal: Journal = field(default_factory=Journal, compare=False)
    """Where it is written down what became of it."""


def completion_prompts(body: CompletionRequest, info: ModelInfo) -> tuple[Prompt, ...]:
    """Check all that can be checked before tokenization, and return the prompts."""
    _check_fields(body, info)
    n = body.n or 1
    num_sequences = len(body.prompt) * (body.best_of or n)
    if num_sequences > MAX_CHOICES:
        name = "n" if body.best_of is None else "best_of"
        raise RequestRejected(
            f"prompts times {name} must be at most {MAX_CHOICES}, not {num_sequences}", param=name
        )
    if body.best_of is not None:
        _check_best_of(body.best_of, n, body)
    if body.max_tokens == 0 and not body.echo:
        raise RequestRejected(
            "max_tokens: 0 is allowed with echo only, for the prompt alone; else it must be at least 1",
            param="max_tokens",
        )
    for prompt in body.prompt:
        _check_prompt(body, prompt, info)
    return body.prompt


def _check_best_of(best_of: int, n: int, body: CompletionRequest) -> None:
    if best_of < n:
        raise RequestRejected(f"best_of must be at least n, {n}, not {best_of}", param="best_of")
    if best_of > n and body.stream:
        raise RequestRejected(
            "best_of beyond n cannot be streamed: which are the best is known at the end only",
            param="best_of",
        )


def _check_prompt(body: CompletionRequest, prompt: Prompt, info: ModelInfo) -> None:
    if isinstance(prompt, str):
        _check_num_chars(len(prompt) + len(body.suffix or ""), info, param="prompt")
    else:
        check_token_ids(prompt, info, param="prompt")
    if body.suffix and not isinstance(prompt, str):
        raise RequestRejected("suffix needs a prompt that is text, not token ids", param="suffix")
    if body.suffix and (body.echo or body.truncate_prompt_tokens is not None):
        raise RequestRejected("suffix excludes echo and truncate_prompt_tokens", param="suffix")


def completion_requests(
    body: CompletionRequest,
    prompts: Sequence[tuple[int, ...]],
    info: ModelInfo,
    origin: Origin,
    *,
    bad_words: BadWords = (),
) -> tuple[GenerationRequest, ...]:
    """One engine request for each tokenized prompt. Raises RequestRejected."""
    name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    num_told = sum(map(len, prompts)) * (body.n or 1)
    _check_num_prompt_logprobs(num_prompt_logprobs(body), num_told, param=name)
    requests = []
    for index, prompt in enumerate(prompts):
        max_tokens = _fit_max_tokens(
            # One token is drawn even if none is asked for; it is not shown.
            body.max_tokens if body.max_tokens is None else max(body.max_tokens, 1),
            len(prompt),
            info,
            names=_COMPLETION_NAMES,
            default=COMPLETION_MAX_TOKENS,
        )
        check_token_ids(prompt, info, param="prompt")
        num_choices = body.best_of or body.n or 1
        ranks = num_choices > (body.n or 1)
        num_logprobs = 0 if body.logprobs is None and ranks else body.logprobs
        params = _sampling(body, info, origin, max_tokens=max_tokens, num_logprobs=num_logprobs)
        params = replace(params, num_prompt_logprobs=num_prompt_logprobs(body), bad_words=bad_words)
        _check_something_is_left(params)
        request = _generation_request(body, prompt, params, origin, place=f"-{index}")
        requests.append(replace(request, n=num_choices))
    return tuple(requests)


def num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """What the two fields that ask for them need together."""
    asked = (body.prompt_logprobs, body.logprobs if body.echo else None)
    return max((number for number in asked if number is not None), default=None)


def _check_num_prompt_logprobs(num_top: int | None, num_told: int, *, param: str) -> None:
    if num_top is not None and num_told * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise RequestRejected(
            f"{param}: {num_told} prompt tokens times choices, with {num_top} alternatives each, are more"
            f" than {MAX_PROMPT_LOGPROBS} log-probabilities; send fewer prompts or ask for fewer",
            param=param,
        )


def kept_prompt(
    body: GenerationFields, prompt: tuple[int, ...], info: ModelInfo, *, max_tokens: int
) -> tuple[int, ...]:
    """What truncate_prompt_tokens leaves of a prompt: its end. Raises RequestRejected."""
    asked = body.truncate_prompt_tokens
    if asked is None:
        return prompt
    if asked == 0 or asked > info.max_model_len:
        raise RequestRejected(
            f"truncate_prompt_tokens must be -1 or from 1 to {info.max_model_len}, not {asked}",
            param="truncate_prompt_tokens",
        )
    return prompt[-(max(info.max_model_len - max_tokens, 1) if asked == -1 else asked) :]


def chat_messages(body: ChatCompletionRequest, info: ModelInfo) -> list[dict[str, Any]]:
    """Check all that can be checked before the template is rendered; return the messages for it."""
    _check_fields(body, info)
    if body.top_logprobs and not body.logprobs:
        raise RequestRejected("top_logprobs needs logprobs to be true", param="top_logprobs")
    messages = template_messages(body.messages)
    _check_num_chars(num_chars(messages), info, param="messages")
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
        template_hints=_effort_hints(body),
    )


def turns_reasoning_off(options: ChatOptions) -> bool:
    """Whether the caller wants an answer without reasoning before it, as far as the template can tell."""
    variables = {**options.template_hints, **options.template_kwargs}
    return any(variables.get(name) is False for name in _THINKING_SWITCHES)


def _effort_hints(body: ChatCompletionRequest) -> dict[str, Any]:
    """What reasoning_effort comes to: many clients send it unasked, so no template has to know it."""
    if body.reasoning_effort is None:
        return {}
    hints: dict[str, Any] = {"reasoning_effort": body.reasoning_effort}
    has_switch = any(name in _THINKING_SWITCHES for name in body.chat_template_kwargs or {})
    if body.reasoning_effort in _NO_REASONING and not has_switch:
        hints |= dict.fromkeys(_THINKING_SWITCHES, False)
    return hints


def chat_request(
    body: ChatCompletionRequest,
    prompt: tuple[int, ...],
    info: ModelInfo,
    origin: Origin,
    *,
    bad_words: BadWords = (),
) -> GenerationRequest:
    """Raises RequestRejected."""
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens is not None and body.max_tokens != asked:
        raise RequestRejected(
            "max_tokens and max_completion_tokens contradict each other", param="max_tokens"
        )
    names = _CHAT_NAMES if body.max_tokens is None else _OLDER_CHAT_NAMES
    max_tokens = _fit_max_tokens(asked, len(prompt), info, names=names, default=None)
    check_token_ids(prompt, info, param="messages")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _sampling(body, info, origin, max_tokens=max_tokens, num_logprobs=num_logprobs)
    params = replace(params, num_prompt_logprobs=body.prompt_logprobs, bad_words=bad_words)
    _check_num_prompt_logprobs(body.prompt_logprobs, len(prompt), param="prompt_logprobs")
    _check_something_is_left(params)
    return _generation_request(body, prompt, params, origin)


def check_model(model: str | None, info: ModelInfo) -> None:
    """Absent means the first name. Raises ModelNotFound."""
    if model is not None and model not in info.served_names:
        names = ", ".join(info.served_names)
        raise ModelNotFound(f"the model {model!r} is not served here; there is: {names}")


def check_token_ids(token_ids: Sequence[int], info: ModelInfo, *, param: str) -> None:
    """Refuse ids that the model has no embedding for; a tokenizer may know more tokens than the model."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= info.vocab_size):
        raise RequestRejected(f"token ids must be from 0 to {info.vocab_size - 1}", param=param)


def _check_fields(body: GenerationFields, info: ModelInfo) -> None:
    check_model(body.model, info)
    if info.pooling is not None:
        raise WrongTask(f"this model does not generate text; it is served to {info.pooling.task}")
    if body.stream_options is not None and not body.stream:
        raise RequestRejected("stream_options is allowed only with stream", param="stream_options")
    for name, token_ids in (
        ("stop_token_ids", body.stop_token_ids),
        ("allowed_token_ids", body.allowed_token_ids),
    ):
        check_token_ids(token_ids or (), info, param=name)
    if body.prompt_logprobs is not None and body.stream:
        raise RequestRejected(
            "prompt_logprobs is not available with stream; completions stream them with echo and logprobs",
            param="prompt_logprobs",
        )


def _check_something_is_left(params: SamplingParams) -> None:
    """Refuse what bans every allowed token: nothing could be drawn."""
    banned = {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens:
        banned |= set(params.stop_token_ids)
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        raise RequestRejected(
            "allowed_token_ids: bad_words and min_tokens ban every one of them", param="allowed_token_ids"
        )


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
_OLDER_CHAT_NAMES = _Names("messages", "max_tokens")


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
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
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
        terms=service_terms(body, origin),
        max_tenant_tokens=origin.key.max_queued_tokens if origin.key else None,
        journal=origin.journal,
    )


def service_terms(body: ServiceFields, origin: Origin) -> ServiceTerms:
    """On what terms a request is served; a null is no limit."""
    salt = body.cache_salt or ""
    return ServiceTerms(
        priority=priority_of(body, origin.key),
        tenant=(body.user or "") if origin.tenant is None else origin.tenant,
        # With a prefix that no other key has, whatever a client chooses stays inside its own.
        cache_salt=f"{origin.key.cache_salt}/{salt}" if origin.key and origin.key.cache_salt else salt,
        time_limits=TimeLimits(
            queue_s=_or_no_limit(body.queue_timeout),
            first_token_s=_or_no_limit(body.first_token_timeout),
            total_s=_or_no_limit(body.timeout),
        ),
    )


def priority_of(body: ServiceFields, key: ApiKey | None) -> int:
    """How urgent it is. Raises NotPermitted for one that is more urgent than the key may ask for."""
    ceiling = key.most_urgent_priority if key else None
    if ceiling is None:
        return body.priority or 0
    if body.priority is not None and body.priority < ceiling:
        raise NotPermitted(
            f"priority: this key may ask for {ceiling} or more, which is less urgent", param="priority"
        )
    return max(0, ceiling) if body.priority is None else body.priority


def _or_no_limit(seconds: float | None) -> float:
    return inf if seconds is None else seconds
