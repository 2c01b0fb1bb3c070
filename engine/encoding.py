"""Prompts and conversations to token ids, beside the event loop.

Owns: the bounded thread pool in which text is rendered and tokenized: seconds, for megabytes of text.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.chat_template import ChatTemplate, FinalMessage
from engine.errors import Overloaded
from engine.tokenizer import Tokenizer
from engine.types import ChatOptions

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

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> tuple[int, ...]:
        if options.continue_final_message:
            final = FinalMessage.CONTINUE
        else:
            final = FinalMessage.ANSWER if options.add_generation_prompt else FinalMessage.NOTHING
        rendered = self._template.render(
            messages, tools=options.tools, final=final, template_kwargs=options.template_kwargs
        )
        return self._tokenizer.encode_rendered_chat(rendered)

    async def _run(self, work: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        if self._num_under_way >= _MAX_UNDER_WAY:
            raise Overloaded("too many prompts are being tokenized; try again later", retry_after_s=1.0)
        self._num_under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_under_way -= 1
