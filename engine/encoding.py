"""Prompts and conversations to token ids and back, beside the event loop.

Owns: the bounded thread pool in which text is rendered and tokenized: seconds, for megabytes of text.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from engine.bad_words import token_sequences
from engine.chat_template import ChatTemplate, FinalMessage
from engine.errors import Overloaded, OverloadReason
from engine.infill import encode_infill
from engine.tokenizer import SpecialTokens, Tokenizer
from engine.types import ChatOptions, TextCut, TokenizedText

ResultT = TypeVar("ResultT")

_NUM_THREADS = 2
_MAX_UNDER_WAY = 256


class Encoder:
    """Raises RequestRejected for text that has no tokens, Overloaded if too many texts wait."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="encoder")
        self._num_under_way = 0

    async def encode(self, text: str) -> tuple[int, ...]:
        return await self._run(lambda: self._tokenizer.encode_prompt(text))

    async def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> tuple[int, ...]:
        return await self._run(lambda: self._encode_chat(messages, options))

    async def encode_texts(self, texts: Sequence[str], cut: TextCut) -> list[TokenizedText]:
        return await self._run(lambda: [self._tokenizer.encode_text(text, cut) for text in texts])

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], cut: TextCut) -> list[TokenizedText]:
        return await self._run(
            lambda: [self._tokenizer.encode_text(text, cut, second=second) for text, second in pairs]
        )

    async def encode_plain(self, text: str) -> tuple[int, ...]:
        return await self._run(lambda: self._tokenizer.encode_plain(text, param="prompt"))

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return await self._run(lambda: token_sequences(words, self._tokenizer))

    async def encode_infill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        return await self._run(lambda: encode_infill(prefix, suffix, self._tokenizer))

    async def decode(self, token_ids: Sequence[int], special: SpecialTokens) -> str:
        return await self._run(lambda: self._tokenizer.decode(token_ids, special=special))

    async def vocabulary_strings(self, token_ids: Sequence[int]) -> list[str]:
        return await self._run(lambda: [self._tokenizer.vocabulary_string(each) for each in token_ids])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> tuple[int, ...]:
        if options.continue_final_message:
            final = FinalMessage.CONTINUE
        else:
            final = FinalMessage.ANSWER if options.add_generation_prompt else FinalMessage.NOTHING
        rendered = self._template.render(
            messages,
            tools=options.tools,
            final=final,
            template_kwargs=options.template_kwargs,
            template_hints=options.template_hints,
        )
        return self._tokenizer.encode_rendered_chat(rendered)

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        if self._num_under_way >= _MAX_UNDER_WAY:
            raise Overloaded(
                "too many prompts are being tokenized; try again later",
                retry_after_s=1.0,
                reason=OverloadReason.TEXTS,
            )
        self._num_under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_under_way -= 1
