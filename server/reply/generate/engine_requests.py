"""Wire requests to engine requests: the one builder of `GenerationRequest` and `SamplingParams`.

Owns: the defaults of shared fields, the room in the context window, and which fields exclude each other.
"""

import secrets
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.errors import ContextLengthExceeded, RequestRejected, WrongTask
from engine.types import AnswerStart, GenerationRequest, Grammar, ModelInfo, SamplingParams
from server.edge.http.disconnect import while_connected
from server.edge.http.edge import Engine
from server.edge.http.served_models import not_served
from server.reply.generate.calls import Origin
from server.reply.generate.model_checks import check_token_ids
from server.reply.generate.protocol import GenerationFields, SamplingFields
from server.reply.generate.structured_output import WantedGrammar

MAX_PROMPT_LOGPROBS = 2**20
"""Entries of a reply: tokens of all prompts, times choices that show them, times alternatives and the token
itself. Each is some 50 bytes of JSON, and costs nothing to ask for."""
_MAX_NAMED_KEYS = 4
_SEED_MASK = 2**64 - 1
_PLAIN = SamplingFields.model_fields.keys() & {each.name for each in fields(SamplingParams)} - {"seed"}
"""Numbers that go as they are into parameters of the same name."""

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names by which an endpoint's errors call the two parts of the context window."""

    prompt: str
    max_tokens: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The fields of engine requests that each endpoint computes in its own way."""

    names: FieldNames
    max_tokens: int | None
    """The number asked for; must fit the context window."""
    default_max_tokens: int | None = None
    """Cut to the room there is; None: all of it."""
    num_choices: int
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    num_prompt_copies: int = 1
    """Choices of the reply that repeat these."""
    grammar: WantedGrammar | None = None
    answer: AnswerStart | None = None
    """Beginning of the answer; None: the first token."""
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens that stay in the text, for the parsers of the reply."""
    prediction: str | None = None
    """Text that the client expects; None: there is none."""


async def engine_requests(
    engine: Engine,
    body: GenerationFields,
    prompts: Mapping[str, TokenIds],
    wanted: Wanted,
    origin: Origin,
) -> list[GenerationRequest]:
    """Build one request for each prompt; `prompts` are token ids by request id.

    Raises RequestRejected, ModelNotFound, Overloaded.
    """
    info = engine.info
    _check_num_prompt_logprobs(body, prompts.values(), wanted)
    bad_words = await engine.encode_words(body.bad_words) if body.bad_words else ()
    max_tokens = [_fit_max_tokens(body, prompt, wanted, info) for prompt in prompts.values()]
    _check_something_is_left(body, bad_words, info)
    # The last of the checks, since it costs the most.
    grammar = await _compiled(engine, body, wanted, origin, num_choices=len(prompts) * wanted.num_choices)
    predicted = await engine.encode_plain(wanted.prediction) if wanted.prediction else ()
    params = [
        _sampling_params(body, info, wanted, max_tokens=num, bad_words=bad_words, grammar=grammar)
        for num in max_tokens
    ]
    info = engine.info  # as it is now: others may have unloaded the adapter meanwhile
    if body.model is not None and not info.is_served(body.model):
        raise not_served(body.model, (*info.name_patterns, *info.names))
    origin.allowance.take_prompt(sum(map(len, prompts.values())))
    return [
        GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=each,
            n=wanted.num_choices,
            stop=tuple(body.stop or ()),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            shown_special_ids=wanted.shown_special_ids,
            prediction=predicted[: each.max_tokens],
            adapter=info.adapter_named(body.model),
            terms=origin.terms,
            max_tenant_tokens=origin.max_tenant_tokens,
            journal=origin.journal,
        )
        for (request_id, prompt), each in zip(prompts.items(), params, strict=True)
    ]


def check_fields(body: GenerationFields, info: ModelInfo) -> None:
    """Check the shared fields, before tokenization. Raises RequestRejected, WrongTask."""
    if info.pooling is not None:
        raise WrongTask(f"this model does not generate text; it is served to {info.pooling.task}")
    if body.stream_options is not None and not body.stream:
        raise RequestRejected("stream_options is allowed only with stream", param="stream_options")
    for name, token_ids in (
        ("stop_token_ids", body.stop_token_ids),
        ("allowed_token_ids", body.allowed_token_ids),
        ("logprob_token_ids", body.logprob_token_ids),
    ):
        check_token_ids(token_ids or (), info, param=name)
    if body.prompt_logprobs is not None and body.stream:
        raise RequestRejected(
            "prompt_logprobs is not available with stream; completions stream them with echo and logprobs",
            param="prompt_logprobs",
        )
    # int() would also take "1_0", " 1" and other alphabets' digits; "070" is a second spelling of 70.
    wrong = [
        key
        for key in body.logit_bias or ()
        if not (key.isdecimal() and len(key) <= 10 and key == str(int(key)) and int(key) < info.vocab_size)
    ]
    if wrong:
        named = ", ".join(repr(key[:64]) for key in wrong[:_MAX_NAMED_KEYS])
        raise RequestRejected(
            f"the keys of logit_bias must be token ids from 0 to {info.vocab_size - 1}, as strings, not"
            f" {named}: the vocabulary has {info.vocab_size}",
            param="logit_bias",
        )


def kept_prompt(body: GenerationFields, prompt: TokenIds, info: ModelInfo, *, max_tokens: int) -> TokenIds:
    """Cut a prompt as truncate_prompt_tokens and truncation_side ask. Raises RequestRejected."""
    asked = body.truncate_prompt_tokens
    if asked is None:
        return prompt
    if asked == 0 or asked > info.max_model_len:
        raise RequestRejected(
            f"truncate_prompt_tokens must be -1 or from 1 to {info.max_model_len}, not {asked}",
            param="truncate_prompt_tokens",
        )
    num_kept = max(info.max_model_len - max_tokens, 1) if asked == -1 else asked
    return prompt[:num_kept] if body.truncation_side == "right" else prompt[-num_kept:]


def _check_num_prompt_logprobs(body: GenerationFields, prompts: Iterable[TokenIds], wanted: Wanted) -> None:
    """Bound the entries of the reply."""
    num_top, num_shown = wanted.num_prompt_logprobs, sum(map(len, prompts)) * wanted.num_prompt_copies
    if num_top is not None and num_shown * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise RequestRejected(
            f"{param}: {num_shown} prompt tokens times choices, with {num_top} alternatives each, are more"
            f" than {MAX_PROMPT_LOGPROBS} log-probabilities; send fewer prompts or ask for fewer",
            param=param,
        )


def _check_can_end(body: GenerationFields, info: ModelInfo, *, param: str) -> None:
    """Refuse a grammar if no end-of-sequence token can end the reply."""
    if not info.eos_token_ids:
        raise RequestRejected(
            f"{param}: this model has no end-of-sequence token, with which every grammar ends",
            param=param,
            code="unsupported_parameter",
        )
    if body.ignore_eos:
        raise RequestRejected(
            f"ignore_eos and {param} exclude each other: a grammar ends with the end-of-sequence token",
            param="ignore_eos",
        )


async def _compiled(
    engine: Engine, body: GenerationFields, wanted: Wanted, origin: Origin, *, num_choices: int
) -> Grammar | None:
    """Compile the grammar for a check; a client that leaves gives up its place in the line."""
    if wanted.grammar is None:
        return None
    asked, tenant = wanted.grammar, origin.terms.tenant
    _check_can_end(body, engine.info, param=asked.param)

    def tried(param: str, grammar: Grammar) -> Awaitable[Grammar]:
        work = engine.compile_grammar(grammar, param=param, num_choices=num_choices, tenant=tenant)
        return while_connected(origin.receive, work)

    try:
        return await tried(asked.param, asked.grammar)
    except RequestRejected:
        for param, part in asked.parts():
            await tried(param, part)
        raise


def _sampling_params(
    body: GenerationFields,
    info: ModelInfo,
    wanted: Wanted,
    *,
    max_tokens: int,
    bad_words: tuple[TokenIds, ...],
    grammar: Grammar | None,
) -> SamplingParams:
    """The request's fields first, then its profile's, the generation config's, OpenAI's defaults."""
    asked = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    numbers: dict[str, Any] = info.sampling_of(body.model) | asked
    top_k = int(numbers.get("top_k", 0))
    numbers["top_k"] = top_k if 0 < top_k < info.vocab_size else 0
    answer = wanted.answer
    if answer is not None:
        own_ids = () if body.ignore_eos else info.eos_token_ids
        late_ids = tuple(each for each in body.stop_token_ids or () if each not in own_ids)
        answer = replace(answer, stop_token_ids=late_ids if answer.token_ids else ())
    if grammar is not None and answer is not None and answer.token_ids:
        grammar = replace(grammar, begins_after=answer.token_ids[0])
    return SamplingParams(
        **numbers,
        logit_bias=_logit_bias(body),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
        bad_words=bad_words,
        grammar=grammar,
        seed=secrets.randbits(64) if body.seed is None else body.seed & _SEED_MASK,
        num_logprobs=wanted.num_logprobs,
        logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids or ())),
        num_prompt_logprobs=wanted.num_prompt_logprobs,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=_stop_token_ids(body, info),
        answer=answer,
    )


def _stop_token_ids(body: GenerationFields, info: ModelInfo) -> tuple[int, ...]:
    model_ids = () if body.ignore_eos else info.eos_token_ids
    return tuple(dict.fromkeys((*model_ids, *(body.stop_token_ids or ()))))


def _logit_bias(body: GenerationFields) -> tuple[tuple[int, float], ...]:
    """Sorted by token id."""
    return tuple(sorted((int(key), float(bias)) for key, bias in (body.logit_bias or {}).items()))


def _check_something_is_left(body: GenerationFields, bad_words: Sequence[TokenIds], info: ModelInfo) -> None:
    """Refuse a request that bans every token it allows: nothing could be sampled."""
    banned = {word[0] for word in bad_words if len(word) == 1}
    if body.min_tokens:
        banned |= set(_stop_token_ids(body, info))
    if body.allowed_token_ids and banned.issuperset(body.allowed_token_ids):
        raise RequestRejected(
            "allowed_token_ids: bad_words and min_tokens ban every one of them", param="allowed_token_ids"
        )


def _fit_max_tokens(body: GenerationFields, prompt: TokenIds, wanted: Wanted, info: ModelInfo) -> int:
    """Check a prompt and the tokens asked for against the context window; return how many there may be."""
    max_tokens = _room_taken(len(prompt), wanted, info)
    check_token_ids(prompt, info, param=wanted.names.prompt)
    if (body.min_tokens or 0) > max_tokens:
        raise RequestRejected(f"min_tokens must be at most max_tokens, {max_tokens}", param="min_tokens")
    return max_tokens


def _room_taken(num_prompt_tokens: int, wanted: Wanted, info: ModelInfo) -> int:
    """A number that is asked for must fit; a default is cut to the room there is."""
    names, asked = wanted.names, wanted.max_tokens
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
        return room if wanted.default_max_tokens is None else min(wanted.default_max_tokens, room)
    if asked > room:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and {names.max_tokens} asks for {asked} more:"
            f" together more than the context window of {info.max_model_len} tokens",
            param=names.max_tokens,
        )
    return asked
