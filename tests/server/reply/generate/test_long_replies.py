"""Whole replies of very many log-probabilities, tokens or vectors: exact, and others have a turn meanwhile.

What is done in a turn of the event loop is counted and not timed, since times are long on a busy machine.
"""

import asyncio
import base64
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any, SupportsIndex

import httpx
import orjson
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.types import (
    ChosenLogprob,
    FinishReason,
    GenerationRequest,
    LogprobEntry,
    PoolingFacts,
    PoolingRequest,
    PoolingTask,
    PromptComputation,
    TokenOutput,
)
from server.api.chat.models import ChatCompletion
from server.api.completions.completions import Completion
from server.api.operations.tokenization import Tokenization
from server.api.pooling.endpoints import Embeddings
from server.api.responses.models import ResponseObject
from server.app import build_app
from server.edge.http.edge import NumberedOutputs
from server.reply.generate import long_reply
from server.reply.generate.answering import whole
from server.reply.generate.long_reply import SENT_AT_ONCE, reply_of
from tests.server.conftest import Settings
from tests.server.fake_engine import INFO, FakeEngine, entry

NUM_CHOICES, NUM_TOKENS, NUM_TOP = 128, 50, 20
NUM_DIMENSIONS = 512
NUM_TURNS = 20
"""A turn does at most one part in so many of the work: a step of the engine is a fiftieth, the fault all."""
COMPLETION = ("/v1/completions", {"prompt": "x", "logprobs": NUM_TOP}, Completion)
MESSAGES = [{"role": "user", "content": "x"}]
CHAT = (
    "/v1/chat/completions",
    {"messages": MESSAGES, "logprobs": True, "top_logprobs": NUM_TOP},
    ChatCompletion,
)


class Work:
    """Counts of what is done in turns of the event loop, by kind: in all of them, and the most in one."""

    def __init__(self) -> None:
        self.whole: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._turn: Counter[str] = Counter()

    def add(self, kind: str, num: int) -> None:
        self._turn[kind] += num

    async def count(self, until: asyncio.Event) -> None:
        while not until.is_set():
            await asyncio.sleep(0)
            self.whole += self._turn
            self.most |= self._turn  # the larger number of each kind
            self._turn.clear()


class CountedTop(tuple[LogprobEntry, ...]):
    """Alternatives that are work when they are read."""

    work: Work

    def __iter__(self) -> Iterator[LogprobEntry]:
        self.work.add("alternatives read", len(self))
        return super().__iter__()

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        self.work.add("alternatives read", len(self))
        return super().__getitem__(place)


class TalkativeEngine(FakeEngine):
    """Makes its outputs step by step, the alternatives of all tokens being the same."""

    def __init__(self, work: Work, *, num_tokens: int = NUM_TOKENS) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self._top = CountedTop(entry(chr(65 + place), -1.0 - place) for place in range(NUM_TOP))
        self._top.work = work

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        for place in range(self._num_tokens):
            is_last = place == self._num_tokens - 1
            for index in range(request.n):
                yield TokenOutput(
                    index=index,
                    text="ab"[place % 2],
                    token_ids=(place,),
                    logprobs=(ChosenLogprob(chosen=entry("ab"[place % 2], -0.1 * index), top=self._top),),
                    finish_reason=FinishReason.LENGTH if is_last else None,
                )
            await asyncio.sleep(0)


def counting_sent(app: ASGIApp, work: Work) -> ASGIApp:
    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            work.add("bytes sent", len(message.get("body", b"")))
            await send(message)

        await app(scope, receive, send_counted)

    return counted


def num_values(value: Any) -> int:
    """Count the values in one; what was made JSON before is one."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values, inner))


async def answered(work: Work, engine: FakeEngine, path: str, fields: dict[str, Any]) -> httpx.Response:
    """The reply, and in `work` what was done for it."""
    app, is_over = build_app(engine, Settings()), asyncio.Event()
    transport = httpx.ASGITransport(counting_sent(app, work))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        turns = asyncio.create_task(work.count(is_over))
        reply = await client.post(path, json=fields)
        is_over.set()
        await turns
    assert work.whole["bytes sent"] == len(reply.content)
    assert int(reply.headers["content-length"]) == len(reply.content)
    assert work.most.pop("bytes sent") <= long_reply.SENT_AT_ONCE
    return reply


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work, dumps = Work(), orjson.dumps

    def dumps_counted(value: Any, **options: Any) -> bytes:
        made = dumps(value, **options)
        work.add("bytes made", len(made))
        work.add("values made JSON", num_values(value))
        return made

    monkeypatch.setattr(orjson, "dumps", dumps_counted)
    return work


@pytest.mark.parametrize(
    ("path", "fields", "model"), [COMPLETION, pytest.param(*CHAT, marks=pytest.mark.night)]
)
async def test_a_reply_of_very_many_logprobs_is_whole_and_holds_up_nobody(path, fields, model, work) -> None:
    asked = {**fields, "n": NUM_CHOICES, "max_tokens": NUM_TOKENS}
    reply = await answered(work, TalkativeEngine(work), path, asked)
    assert work.whole["bytes made"] >= len(reply.content)
    assert work.whole["alternatives read"] >= NUM_CHOICES * NUM_TOKENS * NUM_TOP
    assert {kind: num for kind, num in work.most.items() if num > work.whole[kind] / NUM_TURNS} == {}
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


@pytest.mark.night
async def test_a_response_of_very_many_logprobs_is_whole_and_holds_up_nobody(work) -> None:
    engine = TalkativeEngine(work, num_tokens=8_000)
    reply = await answered(work, engine, "/v1/responses", {"input": "x", "top_logprobs": NUM_TOP})
    # The bytes of its one choice are put together in one turn: they are copied, and their values made before.
    del work.most["bytes made"]
    assert {kind: num for kind, num in work.most.items() if num > work.whole[kind] / NUM_TURNS} == {}
    body = reply.json()
    ResponseObject.model_validate(body, strict=True)
    (part,) = body["output"][0]["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"] == "ab" * 4_000
    assert {len(each["top_logprobs"]) for each in part["logprobs"]} == {NUM_TOP}


async def test_the_tokens_of_a_very_long_text_hold_up_nobody(work, monkeypatch) -> None:
    monkeypatch.setattr("server.api.operations.tokenization._PIECE_TOKENS", 1000)
    monkeypatch.setattr("server.reply.generate.long_reply.SENT_AT_ONCE", 8 * 1024)
    asked = {"prompt": "abcd" * 15_000, "return_token_strs": True}
    reply = await answered(work, FakeEngine(), "/tokenize", asked)
    assert {kind: num for kind, num in work.most.items() if num > work.whole[kind] / NUM_TURNS} == {}
    body = reply.json()
    Tokenization.model_validate(body, strict=True)
    assert body["count"] == len(body["token_strs"])
    assert bytes(body["tokens"][-60_000:]).decode() == asked["prompt"]


class Embedder(FakeEngine):
    """Makes long vectors."""

    def __init__(self) -> None:
        facts = PoolingFacts(
            task=PoolingTask.EMBED, num_dimensions=NUM_DIMENSIONS, prompt=PromptComputation.AT_ONCE
        )
        super().__init__(model_info=replace(INFO, pooling=facts))

    def _vector(self, request: PoolingRequest) -> bytes:
        return struct.pack("<f", request.prompt_token_ids[-1] / 8) * NUM_DIMENSIONS


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_very_many_long_vectors_hold_up_nobody(work, encoding) -> None:
    texts = [chr(65 + place % 26) for place in range(2000)]
    reply = await answered(work, Embedder(), "/v1/embeddings", {"input": texts, "encoding_format": encoding})
    assert {kind: num for kind, num in work.most.items() if num > work.whole[kind] / NUM_TURNS} == {}
    body = reply.json()
    Embeddings.model_validate(body, strict=True)
    assert [item["index"] for item in body["data"]] == list(range(2000))
    for text, item in zip(texts, body["data"], strict=True):
        vector = [ord(text) / 8] * NUM_DIMENSIONS
        packed = base64.b64encode(struct.pack(f"<{NUM_DIMENSIONS}f", *vector)).decode()
        assert item["embedding"] == (vector if encoding == "float" else packed)
    assert body["usage"]["prompt_tokens"] >= 2000


async def test_small_pieces_go_together_so_that_a_reply_waits_for_few_turns() -> None:
    pieces = [bytes([place % 256]) * 999 for place in range(2000)] + [b"x" * (2 * SENT_AT_ONCE)]
    messages: list[Message] = []

    async def note(message: Message) -> None:
        messages.append(message)

    await reply_of(pieces)({"type": "http"}, note, note)
    parts = [message["body"] for message in messages[1:]]
    assert b"".join(parts) == b"".join(pieces)
    assert max(map(len, parts)) == SENT_AT_ONCE
    assert len(parts) == len(b"".join(pieces)) // SENT_AT_ONCE + 2


class WithoutChoices:
    """A reply that keeps none of its choices."""

    def update(self, prompt_index: int, output: TokenOutput) -> None:
        pass

    def finish(self) -> dict[str, Any]:
        return {"id": "x", "choices": [], "usage": {}}


async def test_a_long_reply_without_a_choice_is_json_all_the_same() -> None:
    async def outputs() -> NumberedOutputs:
        token = ChosenLogprob(chosen=entry("a", -1.0), top=())
        yield 0, TokenOutput(index=0, text="", token_ids=(), logprobs=(token,) * 1000)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    body: list[bytes] = []

    async def send(message: Message) -> None:
        body.append(message.get("body", b""))

    scope = {"type": "http", "headers": []}
    reply = await whole(Request(scope, receive), outputs(), WithoutChoices())
    await reply(scope, receive, send)
    assert orjson.loads(b"".join(body)) == WithoutChoices().finish()
    assert reply.headers["content-length"] == str(len(b"".join(body)))
