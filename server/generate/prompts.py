"""From the texts of a request to token ids: prompts, holes, bad words.

Owns: which of the engine's ways to tokenize a request asks for, and what its echo reads.
Never: bounds (protocol.py), what excludes what (translate.py).
"""

import asyncio
from dataclasses import dataclass

from engine.text.tokenizer import SpecialTokens
from engine.types import ModelInfo
from server.generate.protocol import CompletionRequest, GenerationFields, Prompt
from server.generate.translate import COMPLETION_MAX_TOKENS, BadWords, completion_prompts, kept_prompt
from server.http.edge import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """One prompt of a completion."""

    token_ids: tuple[int, ...]
    echo: str = ""
    """Its text, where it is to be echoed."""


async def encode_prompts(engine: Engine, body: CompletionRequest, info: ModelInfo) -> list[EncodedPrompt]:
    """All prompts of a request. Raises RequestRejected, Overloaded."""
    prompts = completion_prompts(body, info)
    return await asyncio.gather(*(_encode(engine, body, prompt, info) for prompt in prompts))


async def encode_bad_words(engine: Engine, body: GenerationFields) -> BadWords:
    """Raises RequestRejected, Overloaded."""
    return await engine.encode_words(body.bad_words) if body.bad_words else ()


async def _encode(engine: Engine, body: CompletionRequest, prompt: Prompt, info: ModelInfo) -> EncodedPrompt:
    token_ids = await _encode_whole(engine, body, prompt)
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    kept = kept_prompt(body, token_ids, info, max_tokens=max_tokens)
    if not body.echo:
        return EncodedPrompt(token_ids=kept)
    if isinstance(prompt, str) and len(kept) == len(token_ids):
        return EncodedPrompt(token_ids=kept, echo=prompt)
    special = SpecialTokens.KEEP if body.skip_special_tokens is False else SpecialTokens.SKIP
    return EncodedPrompt(token_ids=kept, echo=await engine.decode(kept, special))


async def _encode_whole(engine: Engine, body: CompletionRequest, prompt: Prompt) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return prompt
    if body.suffix:
        return await engine.encode_infill(prompt, body.suffix)
    if body.add_special_tokens is False:
        return await engine.encode_plain(prompt)
    return await engine.encode(prompt)
