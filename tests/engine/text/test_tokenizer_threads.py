"""Text is tokenized beside the event loop, and who sends a long one delays only others who do."""

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.errors import Overloaded
from engine.text.chat_template import ChatTemplate
from engine.text.template_messages import Chat, FinalMessage
from engine.text.tokenizer_threads import TokenizerThreads

LONG = "a" * 100_000


class StuckOnLongTexts:
    """A tokenizer that has one token for each character, and needs very long for long texts."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.niceness: dict[int, int] = {}
        """Niceness of the thread that tokenized a text, by the text's length."""
        self.chars_at_once = 0
        """Characters that were tokenized in the thread of the loop."""

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        self.niceness[len(text)] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if threading.current_thread() is threading.main_thread():
            self.chars_at_once += len(text)
        if len(text) == len(LONG):
            assert self.go_on.wait(20)
        return (0,) * len(text)

    encode_rendered_chat = encode_prompt


@pytest.fixture
def tokenizer() -> StuckOnLongTexts:
    return StuckOnLongTexts()


@pytest.fixture
def encoder(tokenizer: StuckOnLongTexts) -> Iterator[TokenizerThreads]:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, special_tokens={})
    stuck: Any = tokenizer
    encoder = TokenizerThreads(stuck, template)
    yield encoder
    tokenizer.go_on.set()
    encoder.close()


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def test_short_texts_do_not_wait_for_long_ones(
    encoder: TokenizerThreads, tokenizer: StuckOnLongTexts
) -> None:
    long_ones = [
        asyncio.create_task(each)
        for each in (
            encoder.encode(LONG),
            encoder.encode(LONG),
            encoder.encode_chat(Chat(messages=chat(LONG))),
        )
    ]
    async with asyncio.timeout(30):
        assert len(await encoder.encode("short")) == 5
        assert len(await encoder.encode_chat(Chat(messages=chat("short")))) == 5
    assert not any(task.done() for task in long_ones)
    tokenizer.go_on.set()
    assert [len(tokens) for tokens in await asyncio.gather(*long_ones)] == [len(LONG)] * 3


async def test_many_tiny_texts_of_a_turn_do_not_hold_up_the_loop(
    encoder: TokenizerThreads, tokenizer: StuckOnLongTexts
) -> None:
    """128 characters are tokenized at once, and as many in a later turn."""
    for _ in range(2):
        tokenizer.chars_at_once = 0
        await asyncio.gather(*(encoder.encode("a" * 30) for _ in range(100)))
        assert tokenizer.chars_at_once == 120
        await asyncio.sleep(0)


async def test_a_long_text_leaves_the_cores_to_others(
    encoder: TokenizerThreads, tokenizer: StuckOnLongTexts
) -> None:
    tokenizer.go_on.set()
    await encoder.encode(LONG)
    await encoder.encode("short")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert tokenizer.niceness == {len(LONG): max(own, 10), 5: own}


async def test_too_many_long_texts_are_refused_and_short_ones_still_taken(
    encoder: TokenizerThreads, tokenizer: StuckOnLongTexts
) -> None:
    waiting = [asyncio.create_task(encoder.encode(LONG)) for _ in range(32)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as told:
        await encoder.encode(LONG)
    assert told.value.reason == "texts"
    assert await encoder.encode("short")
    tokenizer.go_on.set()
    await asyncio.gather(*waiting)
    assert await encoder.encode(LONG)


async def test_tokens_that_begin_an_answer_are_counted_once_for_each_choice_of_variables(
    tokenizer: StuckOnLongTexts,
) -> None:
    source = (
        "[{{ messages[0].content }}]"
        "{% if add_generation_prompt %}<a>{% if enable_thinking %}<t>{% endif %}{% endif %}"
    )
    stuck: Any = tokenizer
    encoder = TokenizerThreads(stuck, ChatTemplate({"default": source}, special_tokens={}))
    try:
        for _ in range(2):
            assert await encoder.num_answer_tokens(Chat(messages=[])) == 3
            thinking = Chat(messages=[], kwargs={"enable_thinking": True})
            assert await encoder.num_answer_tokens(thinking) == 6
            assert await encoder.num_answer_tokens(Chat(messages=[], final=FinalMessage.NOTHING)) == 0
        assert sorted(tokenizer.niceness) == [3, 6, 9], "three texts"
    finally:
        encoder.close()


async def test_a_template_that_refuses_a_short_conversation_tells_nothing(
    tokenizer: StuckOnLongTexts,
) -> None:
    stuck: Any = tokenizer
    refusing = ChatTemplate({"default": "{{ raise_exception('no') }}"}, special_tokens={})
    encoder = TokenizerThreads(stuck, refusing)
    try:
        assert await encoder.num_answer_tokens(Chat(messages=[])) == 0
    finally:
        encoder.close()
