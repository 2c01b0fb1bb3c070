"""Streams whose tokens are written in the turn after they came, without their task."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from engine.types import FinishReason, Readable, TokenOutput
from server.api.chat.replies import ChatStream
from server.api.completions.replies import CompletionPlan, CompletionStream
from server.edge.http.edge import ClientTimeouts
from server.reply.generate.replies import ReplyHead, ReplyPlan
from server.reply.generate.sse import EventStream

WORDS = ["One", ' "two"', "\n", "", " vier\0\u2028", " é", " end"]
EDGE = SimpleNamespace(
    patience=ClientTimeouts(), metrics=SimpleNamespace(slow_client_aborts=None, count_error=lambda _: None)
)
SHARED = ReplyPlan(
    head=ReplyHead(id="x", created_s=1, model="tiny", system_fingerprint="fp"), num_prompt_tokens=(3,), n=2
)


def stream_of(kind: str) -> ChatStream | CompletionStream:
    if kind == "chat":
        return ChatStream(SHARED)
    plan = CompletionPlan(
        shared=SHARED, num_kept=2, num_logprobs=0, generates=True, echoes=(), first_tokens=()
    )
    return CompletionStream(plan)


class Call:
    """A call of two choices, whose words come one by one, and its client."""

    def __init__(self, reply: ChatStream | CompletionStream) -> None:
        self.reply = reply
        self.readable = Readable()
        self.readable.outputs = lambda: None if self._is_over else self._take()
        self.sent = b""
        self.is_full = False
        self.num_wakes = 0
        self._is_over = False
        self._new: list[tuple[int, TokenOutput]] = []

    def _take(self) -> list[tuple[int, TokenOutput]]:
        taken, self._new = self._new, []
        return taken

    def say(self, place: int) -> None:
        self._is_over = place == len(WORDS) - 1
        reason = FinishReason.STOP if self._is_over else None
        self._new += [
            (0, TokenOutput(index=index, text=WORDS[place], token_ids=(place,), finish_reason=reason))
            for index in (0, 1)
        ]
        self.readable.set()

    async def outputs(self) -> AsyncGenerator[tuple[int, TokenOutput], None]:
        while not self._is_over or self._new:
            await self.readable.wait()
            self.num_wakes += 1
            for each in self._take():
                yield each

    async def send(self, message: dict) -> None:
        self.sent += message.get("body", b"")

    def write(self, data: bytes) -> bool:
        if not self.is_full:
            self.sent += data
        return not self.is_full

    async def play(self, *, full_at: int = -1, quick: bool = True) -> bytes:
        options = {"quick": self.reply.quick, "readable": self.readable} if quick else {}
        stream = EventStream(self.outputs(), self.reply, EDGE, **options)
        scope = {"http_version": "1.1", "state": {"tokenyard.write_chunk": self.write}}
        streaming = asyncio.create_task(stream(scope, asyncio.Event().wait, self.send))
        await asyncio.sleep(0.01)
        for place in range(len(WORDS)):
            self.is_full = place == full_at
            self.say(place)
            await asyncio.sleep(0.01)
        await asyncio.wait_for(streaming, 60)
        return self.sent


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_only_the_first_and_the_last_tokens_wake_the_task(kind: str) -> None:
    slow = await Call(stream_of(kind)).play(quick=False)
    call = Call(stream_of(kind))
    assert await call.play() == slow
    assert call.num_wakes == 2


async def test_a_full_socket_leaves_its_tokens_to_the_task_in_their_order() -> None:
    plain = await Call(stream_of("chat")).play()
    call = Call(stream_of("chat"))
    assert await call.play(full_at=3) == plain
    assert call.num_wakes == 3


async def test_what_fails_while_tokens_are_written_ends_the_stream_with_an_error() -> None:
    call = Call(stream_of("chat"))
    call.reply.quick = lambda place, output: 1 / 0 if output.text == "\n" else None
    sent = await call.play()
    assert b'"error"' in sent
    assert sent.count(b"[DONE]") == 1
    assert b"two" in sent
    assert b"vier" not in sent
