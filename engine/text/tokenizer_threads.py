"""Threads that tokenize and have chats rendered, so that long texts do not block the event loop.

Owns: the threads and the bounds on waiting texts. Long texts have a thread of their own, so short ones
never wait for them; no text waits for a chat that is being rendered.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from engine.errors import Overloaded, OverloadReason, RequestRejected
from engine.text.chat_template import ChatTemplate
from engine.text.infill import encode_infill
from engine.text.renderers import MAX_RENDERERS
from engine.text.template_messages import Chat, FinalMessage
from engine.text.tokenizer import SpecialTokens, Tokenizer
from engine.types import TextCut, TokenizedText
from worker.machine import lower_precedence

ResultT = TypeVar("ResultT")

_TINY_CHARS = 128
"""Most in a turn of the loop that are tokenized at once: that takes less than to wake a thread for them."""
_LONG_CHARS = 64 * 1024
"""About a tenth of a second of tokenizing."""
_NICENESS_OF_LONG = 10
"""The tokenizer lets go of the interpreter, and takes seconds of a core that steps wait for."""
_SHORT_CHAT = [{"role": "user", "content": "1"}]
_MAX_VARIABLES_CHARS = 1000
_MAX_CHOICES = 64
"""Choices of a template's variables for which the beginning of the answer is remembered."""


class _Lane:
    """A pool of threads with a bound on the texts that run and wait."""

    def __init__(
        self,
        counting_refusals: Callable[[], AbstractContextManager[None]],
        name: str,
        *,
        num_threads: int,
        max_under_way: int,
        niceness: int = 0,
    ) -> None:
        self._counting_refusals = counting_refusals
        step_back = partial(lower_precedence, niceness) if niceness else None
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=step_back)
        self._max_under_way = max_under_way
        self._num_under_way = 0

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in a thread. Raises Overloaded, and the errors of `work`."""
        if self._num_under_way >= self._max_under_way:
            with self._counting_refusals():
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

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class TokenizerThreads:
    """Tokenizer and chat template, used in threads.

    Methods raise RequestRejected for text that has no tokens, Overloaded if too many texts wait.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        counting_refusals: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`counting_refusals` is a context that counts an Overloaded which is raised inside."""
        self._tokenizer = tokenizer
        self._template = template
        lane = partial(_Lane, counting_refusals)
        self._short = lane("encoder", num_threads=2, max_under_way=256)
        self._long = lane("encoder-long", num_threads=1, max_under_way=32, niceness=_NICENESS_OF_LONG)
        self._num_turn_chars = 0
        self._num_answer_tokens: dict[str, int] = {}  # by the variables of the template
        self._chats = lane("renderer", num_threads=MAX_RENDERERS, max_under_way=256)

    async def encode(self, text: str) -> tuple[int, ...]:
        if self._fits_turn(text):
            return self._tokenizer.encode_prompt(text)
        return await self._lane(len(text)).run(lambda: self._tokenizer.encode_prompt(text))

    async def encode_chat(self, chat: Chat, marks: tuple[str, str] | None = None) -> tuple[int, ...]:
        """Render a conversation by the model's template, and encode it.

        `marks` are a text of the template's, and one that takes its place everywhere.
        """
        rendered = await self._chats.run(lambda: self._template.render(chat))
        if marks is not None:
            rendered = rendered.replace(*marks)
        if self._fits_turn(rendered):
            return self._tokenizer.encode_rendered_chat(rendered)
        return await self._lane(len(rendered)).run(lambda: self._tokenizer.encode_rendered_chat(rendered))

    async def num_answer_tokens(self, chat: Chat) -> int:
        """Count the tokens at the end of a prompt that begin the answer: history may have another text there.

        Found once for each choice of the template's variables, on a short conversation; 0 if there are none,
        or if the template refuses that one.
        """
        variables = repr((chat.kwargs, chat.hints))
        if chat.final is not FinalMessage.ANSWER or len(variables) > _MAX_VARIABLES_CHARS:
            return 0
        if variables not in self._num_answer_tokens:
            if len(self._num_answer_tokens) == _MAX_CHOICES:
                self._num_answer_tokens.clear()
            short = replace(chat, messages=_SHORT_CHAT, tools=())
            self._num_answer_tokens[variables] = await self._measure_answer(short)
        return self._num_answer_tokens[variables]

    async def _measure_answer(self, chat: Chat) -> int:
        try:
            asked = await self.encode_chat(chat)
            plain = await self.encode_chat(replace(chat, final=FinalMessage.NOTHING))
        except RequestRejected:
            return 0
        differ = (place for place, pair in enumerate(zip(asked, plain, strict=False)) if pair[0] != pair[1])
        return len(asked) - next(differ, min(len(asked), len(plain)))

    async def encode_texts(self, texts: Sequence[str], cut: TextCut) -> list[TokenizedText]:
        """Encode texts for a pooling model, with special tokens."""
        lane = self._lane(sum(map(len, texts)))
        return await lane.run(lambda: [self._tokenizer.encode_text(text, cut) for text in texts])

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], cut: TextCut) -> list[TokenizedText]:
        lane = self._lane(sum(len(text) + len(second) for text, second in pairs))
        return await lane.run(
            lambda: [self._tokenizer.encode_text(text, cut, second=second) for text, second in pairs]
        )

    async def encode_plain(self, text: str) -> tuple[int, ...]:
        """Encode a prompt without special tokens around it."""
        return await self._lane(len(text)).run(lambda: self._tokenizer.encode_plain(text, param="prompt"))

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Encode bad words as token sequences."""
        return await self._short.run(lambda: self._tokenizer.encode_bad_words(words))

    async def encode_infill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        """Encode a prompt whose middle is to be filled in."""
        lane = self._lane(len(prefix) + len(suffix))
        return await lane.run(lambda: encode_infill(prefix, suffix, self._tokenizer))

    async def decode(self, token_ids: Sequence[int], special: SpecialTokens) -> str:
        lane = self._lane(len(token_ids))
        return await lane.run(lambda: self._tokenizer.decode(token_ids, special=special))

    async def vocabulary_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them."""
        lane = self._lane(len(token_ids))
        return await lane.run(lambda: [self._tokenizer.vocabulary_string(each) for each in token_ids])

    def close(self) -> None:
        """End the threads, and the processes of the chat template."""
        self._short.close()
        self._long.close()
        self._chats.close()
        self._template.close()

    def _fits_turn(self, text: str) -> bool:
        """Count a text; return whether all that were counted in this turn of the loop are few characters."""
        if not self._num_turn_chars:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._num_turn_chars += max(len(text), 1)
        return self._num_turn_chars <= _TINY_CHARS

    def _end_turn(self) -> None:
        self._num_turn_chars = 0

    def _lane(self, num_chars: int) -> _Lane:
        return self._long if num_chars > _LONG_CHARS else self._short
