"""Whole replies of very many log-probabilities: exact like short ones, and others have a turn meanwhile."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from engine.types import FinishReason, GenerationRequest, TokenLogprob, TokenOutput
from server.app import build_app
from server.chat.chat_models import ChatCompletion
from server.completions.completion_models import Completion
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import FakeEngine, entry

NUM_CHOICES, NUM_TOKENS, NUM_TOP = 128, 100, 20
MAX_TURN_S = 0.05
"""Processor time of one turn of the event loop. All at once take 0.1 s of a completion, 0.7 s of a chat."""
COMPLETION = ("/v1/completions", {"prompt": "x", "logprobs": NUM_TOP}, Completion)
MESSAGES = [{"role": "user", "content": "x"}]
CHAT = (
    "/v1/chat/completions",
    {"messages": MESSAGES, "logprobs": True, "top_logprobs": NUM_TOP},
    ChatCompletion,
)


class TalkativeEngine(FakeEngine):
    """Makes its outputs step by step, the alternatives of all tokens being the same."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        top = tuple(entry(chr(65 + place), -1.0 - place) for place in range(NUM_TOP))
        for place in range(NUM_TOKENS):
            is_last = place == NUM_TOKENS - 1
            for index in range(request.n):
                yield TokenOutput(
                    index=index,
                    text="ab"[place % 2],
                    token_ids=(place,),
                    logprobs=(TokenLogprob(chosen=entry("ab"[place % 2], -0.1 * index), top=top),),
                    finish_reason=FinishReason.LENGTH if is_last else None,
                )
            await asyncio.sleep(0)


async def longest_turn_s(until: asyncio.Event) -> float:
    longest_s, last_s = 0.0, time.thread_time()
    while not until.is_set():
        await asyncio.sleep(0)
        now_s = time.thread_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s


@pytest.mark.parametrize(("path", "fields", "model"), [COMPLETION, CHAT])
async def test_a_reply_of_very_many_logprobs_is_whole_and_holds_up_nobody(path, fields, model) -> None:
    app, is_over = build_app(TalkativeEngine(), Settings()), asyncio.Event()
    async with connect(app) as client:
        turns = asyncio.create_task(longest_turn_s(is_over))
        reply = await client.post(path, json={**fields, "n": NUM_CHOICES, "max_tokens": NUM_TOKENS})
        is_over.set()
        assert await turns < MAX_TURN_S
    assert int(reply.headers["content-length"]) == len(reply.content)
    body = reply.json()
    model.model_validate(body, strict=True)
    assert [choice["index"] for choice in body["choices"]] == list(range(NUM_CHOICES))
    assert body["usage"]["completion_tokens"] == NUM_CHOICES * NUM_TOKENS
    for index, choice in enumerate(body["choices"]):
        logprobs = choice["logprobs"]
        if model is Completion:
            assert "".join(logprobs["tokens"]) == choice["text"] == "ab" * (NUM_TOKENS // 2)
            assert logprobs["text_offset"] == list(range(NUM_TOKENS))
            assert logprobs["token_logprobs"] == [-0.1 * index] * NUM_TOKENS
            assert all(len(top) >= NUM_TOP for top in logprobs["top_logprobs"])
        else:
            content = logprobs["content"]
            assert "".join(each["token"] for each in content) == choice["message"]["content"]
            assert [each["logprob"] for each in content] == [-0.1 * index] * NUM_TOKENS
            assert {len(each["top_logprobs"]) for each in content} == {NUM_TOP}
