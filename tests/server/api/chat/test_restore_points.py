"""The engine is told where later prompts of a conversation go on, if its layers cannot go on anywhere."""

import dataclasses

import pytest

from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, LifetimeKind
from tests.server.fake_engine import INFO, FakeEngine

CHAT = "/v1/chat/completions"
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
