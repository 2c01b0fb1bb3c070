"""The engine is told where later prompts of a conversation go on, if its layers cannot go on anywhere."""

import dataclasses

import pytest

from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, LifetimeKind
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


def marked(text: str) -> dict[str, object]:
    return {"type": "text", "text": text, "cache_control": MARK}


RESULT = {"type": "tool_result", "tool_use_id": "call", "content": "z" * 5, "cache_control": MARK}
USE = {"type": "tool_use", "id": "call", "name": "f", "input": {}}
TURNS = [
    {"role": "user", "content": [marked("a" * 4), {"type": "text", "text": "b" * 6}]},
    {"role": "assistant", "content": [USE]},
    {"role": "user", "content": [RESULT, {"type": "text", "text": "c" * 9}]},
]
TOOL = {"name": "f", "input_schema": {"type": "object"}, "cache_control": MARK}


@pytest.mark.parametrize(
    ("lifetimes", "changes", "expected"),
    [
        ((ALL_TOKENS, WINDOW), {}, (4, 16, 22)),
        ((ALL_TOKENS, WINDOW), {"system": [marked("s" * 7)]}, (7, 11, 23, 29)),
        ((ALL_TOKENS, WINDOW), {"system": "s" * 7, "tools": [TOOL]}, (7, 11, 23, 29)),
        ((ALL_TOKENS,), {}, ()),
    ],
    ids=["blocks", "system", "tools", "all"],
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
    response = await client.post(MESSAGES, json={"messages": TURNS, "max_tokens": 2, **changes})
    assert response.status_code == 200, response.text
    assert engine.requests[0].restore_at == expected


async def test_marks_divide_the_usage_into_what_was_found_what_is_kept_and_the_rest(client) -> None:
    """Ten tokens, of which four are found in a cache and eight will be."""
    for content, kept in (("a" * 10, 0), ([marked("a" * 10)], 4)):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        usage = (await client.post(MESSAGES, json=body)).json()["usage"]
        assert usage["cache_read_input_tokens"] == 4
        assert usage["cache_creation_input_tokens"] == kept
        assert usage["input_tokens"] == 10 - 4 - kept


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_more_marks_than_four_are_refused(client, path: str) -> None:
    body = {"messages": [{"role": "user", "content": [marked("a")] * 5}], "max_tokens": 2}
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert "at most 4" in response.text
