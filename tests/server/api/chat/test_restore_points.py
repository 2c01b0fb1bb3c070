"""The engine is told where later prompts of a conversation go on, if its layers cannot go on anywhere."""

import asyncio
import dataclasses

import pytest
from starlette.requests import ClientDisconnect

from engine.errors import EngineUnavailable, Overloaded
from engine.types import ServiceTerms
from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, LifetimeKind
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.turn import prepare_turn
from server.app import build_app
from server.reply.generate.calls import Origin
from tests.server.conftest import Settings
from tests.server.fake_engine import INFO, FakeEngine

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
MARK = {"type": "ephemeral"}
WINDOW = Lifetime(LifetimeKind.WINDOW, 1024)


@pytest.mark.parametrize(
    ("lifetimes", "n", "expected"),
    [((ALL_TOKENS,), 1, ()), ((ALL_TOKENS, WINDOW), 1, (7,)), ((WINDOW,), 2, (7, 9))],
    ids=["all", "window", "two choices"],
)
async def test_the_end_of_the_last_message_is_named(
    client, engine: FakeEngine, lifetimes: tuple[Lifetime, ...], n: int, expected: tuple[int, ...]
) -> None:
    """The prompt has ten tokens, of which three begin the answer."""
    engine.model_info = dataclasses.replace(INFO, groups=tuple(map(CacheGroup, lifetimes)))
    message = {"role": "user", "content": "a" * 10}
    response = await client.post(CHAT, json={"messages": [message], "max_tokens": 2, "n": n})
    assert response.status_code == 200, response.text
    (request,) = engine.requests
    assert request.restore_at == expected


WITH_WINDOW = dataclasses.replace(INFO, groups=(CacheGroup(ALL_TOKENS), CacheGroup(WINDOW)))


def plain(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def marked(text: str) -> dict[str, object]:
    return {"type": "text", "text": text, "cache_control": MARK}


RESULT = {"type": "tool_result", "tool_use_id": "call", "content": "z" * 5, "cache_control": MARK}
USE = {"type": "tool_use", "id": "call", "name": "f", "input": {}}
TURNS = [
    {"role": "user", "content": [marked("a" * 4), {"type": "text", "text": "b" * 6}]},
    {"role": "assistant", "content": [USE]},
    {"role": "user", "content": [RESULT, {"type": "text", "text": "c" * 9}]},
]
FAILURE = {
    "type": "tool_result",
    "tool_use_id": "call",
    "content": [marked("zz"), plain("zzz")],
    "is_error": True,
}
FAILED = {"role": "user", "content": [FAILURE, plain("c" * 9)]}
TOOL = {"name": "f", "input_schema": {"type": "object"}, "cache_control": MARK}


@pytest.mark.parametrize(
    ("lifetimes", "changes", "expected"),
    [
        ((ALL_TOKENS, WINDOW), {}, (4, 16, 22)),
        ((ALL_TOKENS, WINDOW), {"system": [marked("s" * 7)]}, (7, 11, 23, 29)),
        ((ALL_TOKENS, WINDOW), {"system": "s" * 7, "tools": [TOOL]}, (7, 11, 23, 29)),
        ((ALL_TOKENS, WINDOW), {"system": "s" * 7, "tools": [TOOL | {"cache_control": {}}]}, (7, 11, 23, 29)),
        ((ALL_TOKENS, WINDOW), {"messages": [*TURNS[:2], FAILED]}, (4, 20, 30)),
        ((ALL_TOKENS,), {}, ()),
    ],
    ids=["blocks", "system", "tools", "an empty mark of tools", "a failure", "all"],
)
async def test_the_ends_of_marked_blocks_are_named(
    client,
    engine: FakeEngine,
    lifetimes: tuple[Lifetime, ...],
    changes: dict[str, object],
    expected: tuple[int, ...],
) -> None:
    """Blocks of a message are a line each; the last three tokens begin the answer."""
    groups = tuple(map(CacheGroup, lifetimes))
    engine.model_info = dataclasses.replace(
        INFO, groups=groups, chat_template="<tool_call>", max_model_len=4096
    )
    response = await client.post(MESSAGES, json={"messages": TURNS, "max_tokens": 2} | changes)
    assert response.status_code == 200, response.text
    assert engine.requests[0].restore_at == expected


@pytest.mark.parametrize(
    ("marks", "expected"), [((), ()), ((0, 1), (3, 8)), ((1,), (8,)), ((0,), (3, 8))], ids=str
)
async def test_the_end_of_the_last_block_is_found_too_where_no_answer_begins(
    client, engine: FakeEngine, marks: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    engine.model_info = WITH_WINDOW
    parts = [marked(text) if place in marks else plain(text) for place, text in enumerate(("sys", "other"))]
    messages = [
        {"role": role, "content": [part]} for role, part in zip(("system", "user"), parts, strict=True)
    ]
    body = {"messages": messages, "max_tokens": 2, "add_generation_prompt": False}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert engine.requests[0].restore_at == expected


@pytest.mark.parametrize(
    "error", [Overloaded("texts wait", retry_after_s=1), EngineUnavailable("no process renders")], ids=str
)
async def test_a_mark_that_cannot_be_rendered_is_left_out(
    client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine.model_info = WITH_WINDOW
    encode = engine.encode_chat

    async def encode_once(chat):
        if engine.chats:
            raise error
        return await encode(chat)

    monkeypatch.setattr(engine, "encode_chat", encode_once)
    body = {"messages": [{"role": "user", "content": [marked("a" * 4), plain("b" * 6)]}], "max_tokens": 2}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    assert engine.requests[0].restore_at == (8,)


async def test_no_mark_is_rendered_for_a_client_that_has_left(engine: FakeEngine, monkeypatch) -> None:
    engine.model_info = WITH_WINDOW
    encode, is_cancelled = engine.encode_chat, asyncio.Event()

    async def encode_once(chat):
        if not engine.chats:
            return await encode(chat)
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    async def receive():
        return {"type": "http.disconnect"}

    monkeypatch.setattr(engine, "encode_chat", encode_once)
    message = {"role": "user", "content": [marked("aaaa"), plain("bbbbbb")]}
    body = ChatCompletionRequest.model_validate({"messages": [message]})
    origin = Origin(reply_id="r", terms=ServiceTerms(), receive=receive)
    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(prepare_turn(build_app(engine, Settings()).state.edge, body, origin), 5)
    assert is_cancelled.is_set()


async def test_marks_divide_the_usage_into_what_was_found_what_is_kept_and_the_rest(client) -> None:
    """Ten tokens, of which four are found in a cache and eight will be."""
    for content, kept in (("a" * 10, 0), ([marked("a" * 10)], 4)):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        usage = (await client.post(MESSAGES, json=body)).json()["usage"]
        assert usage["cache_read_input_tokens"] == 4
        assert usage["cache_creation_input_tokens"] == kept
        assert usage["input_tokens"] == 10 - 4 - kept


@pytest.mark.parametrize("path", [CHAT, MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_more_marks_than_four_are_refused(client, path: str) -> None:
    body = {"messages": [{"role": "user", "content": [marked("a")] * 5}]}
    body |= {} if path.endswith("count_tokens") else {"max_tokens": 2}
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert "at most 4" in response.text
