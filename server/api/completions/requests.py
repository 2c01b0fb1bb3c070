"""Completion requests: their checks before tokenization, their prompts as token ids, their engine fields.

Owns: the fields that only /v1/completions has, as this model understands them.
"""

import asyncio
from dataclasses import dataclass, replace

from engine.errors import RequestRejected
from engine.text.tokenizer import SpecialTokens
from engine.types import GenerationRequest, ModelInfo
from server.api.completions.protocol import CompletionRequest
from server.edge.http.edge import Engine
from server.reply.generate.calls import Origin
from server.reply.generate.engine_requests import (
    FieldNames,
    TokenIds,
    Wanted,
    check_fields,
    engine_requests,
    kept_prompt,
)
from server.reply.generate.model_checks import check_num_chars, check_token_ids
from server.reply.generate.protocol import Prompt
from server.reply.generate.structured_output import wanted_grammar

MAX_CHOICES = 1024
"""Prompts times n: sequences that one HTTP request may make the engine hold at once."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
_NAMES = FieldNames("prompt", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    token_ids: TokenIds
    echo: str = ""
    """Its text, where it is to be echoed."""


def check_completion(body: CompletionRequest, info: ModelInfo) -> None:
    """Check all that can be checked before tokenization. Raises RequestRejected."""
    check_fields(body, info)
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
    if body.logprob_token_ids and (body.logprobs is None or body.max_tokens == 0):
        raise RequestRejected(
            "logprob_token_ids needs logprobs to be set, and max_tokens of at least 1: it is about generated"
            " tokens",
            param="logprob_token_ids",
        )
    for prompt in body.prompt:
        _check_prompt(body, prompt, info)


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
        check_num_chars(len(prompt) + len(body.suffix or ""), info, param="prompt")
    else:
        check_token_ids(prompt, info, param="prompt")
    if body.suffix and not isinstance(prompt, str):
        raise RequestRejected("suffix needs a prompt that is text, not token ids", param="suffix")
    if body.suffix and (body.echo or body.truncate_prompt_tokens is not None):
        raise RequestRejected("suffix excludes echo and truncate_prompt_tokens", param="suffix")


async def encode_prompts(engine: Engine, body: CompletionRequest) -> list[EncodedPrompt]:
    """Token ids of all prompts of a request. Raises RequestRejected, Overloaded."""
    if len(body.prompt) == 1:  # a task of its own would cost more than to encode it
        return [await _encode(engine, body, body.prompt[0])]
    return await asyncio.gather(*(_encode(engine, body, prompt) for prompt in body.prompt))


def wanted_completion(body: CompletionRequest) -> Wanted:
    """Compute the fields that all engine requests of a body share. Raises RequestRejected."""
    num_choices = body.best_of or body.n or 1
    ranks = num_choices > (body.n or 1)
    # Alternatives that the two fields which ask for them need together.
    asked = (body.prompt_logprobs, body.logprobs if body.echo else None)
    return Wanted(
        names=_NAMES,
        # One token is sampled even if none is asked for; it is not shown.
        max_tokens=body.max_tokens if body.max_tokens is None else max(body.max_tokens, 1),
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_choices=num_choices,
        num_logprobs=0 if body.logprobs is None and ranks else body.logprobs,
        num_prompt_logprobs=max((number for number in asked if number is not None), default=None),
        num_prompt_copies=body.n or 1,
        grammar=wanted_grammar(body.response_format, body.structured_outputs),
    )


async def fitting_completion(engine: Engine, body: CompletionRequest, origin: Origin) -> GenerationRequest:
    """Prepare the only prompt of a body whose max_tokens says "at most"; absent: what the window leaves.

    For other servers' endpoints. Raises RequestRejected, Overloaded.
    """
    check_completion(body, engine.info)
    prompts = await encode_prompts(engine, body)
    wanted = replace(wanted_completion(body), max_tokens=None, default_max_tokens=body.max_tokens)
    prompt_ids = {origin.reply_id: prompts[0].token_ids}
    (request,) = await engine_requests(engine, body, prompt_ids, wanted, origin)
    return request


async def _encode(engine: Engine, body: CompletionRequest, prompt: Prompt) -> EncodedPrompt:
    token_ids = await _encode_whole(engine, body, prompt)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    kept = kept_prompt(body, token_ids, engine.info, max_tokens=max_tokens)
    if not body.echo:
        return EncodedPrompt(token_ids=kept)
    if isinstance(prompt, str) and len(kept) == len(token_ids):
        return EncodedPrompt(token_ids=kept, echo=prompt)
    # Special tokens that the client wrote itself, as ids, are part of its prompt.
    is_shown = body.skip_special_tokens is False or not isinstance(prompt, str)
    special = SpecialTokens.KEEP if is_shown else SpecialTokens.SKIP
    return EncodedPrompt(token_ids=kept, echo=await engine.decode(kept, special))


async def _encode_whole(engine: Engine, body: CompletionRequest, prompt: Prompt) -> TokenIds:
    if not isinstance(prompt, str):
        return prompt
    if body.suffix:
        return await engine.encode_infill(prompt, body.suffix)
    if body.add_special_tokens is False:
        return await engine.encode_plain(prompt)
    return await engine.encode(prompt)
