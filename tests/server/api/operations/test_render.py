"""POST .../render: the prompts that requests would have, through the whole application."""

import dataclasses

import pytest

from server.api.operations.render import Rendered
from tests.server.fake_engine import INFO

TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": [5, 6, 7], "temperature": 0.5}),
        ("/v1/completions", {"prompt": ["hi", "you"], "truncate_prompt_tokens": 1}),
        ("/v1/chat/completions", {"messages": TURNS}),
        ("/v1/chat/completions", {"messages": TURNS, "tools": [LOOK], "truncate_prompt_tokens": 2}),
        ("/v1/chat/completions", {"messages": TURNS[:2], "continue_final_message": True}),
        ("/v1/chat/completions", {"messages": TURNS, "reasoning_effort": "none"}),
        ("/v1/messages", {"messages": TURNS, "system": "s", "model": "fake"}),
    ],
)
async def test_a_render_has_the_tokens_that_the_request_itself_has(client, engine, path, body):
    engine.model_info = dataclasses.replace(INFO, chat_template="<tool_call>", max_model_len=4096)
    asked = {**body, "max_tokens": 3}
    response = await client.post(f"{path}/render", json=asked)
    assert response.status_code == 200, response.text
    found = response.json() if path == "/v1/completions" else [response.json()]
    assert not engine.requests
    assert (await client.post(path, json=asked)).status_code == 200
    assert [tuple(each["token_ids"]) for each in found] == [each.prompt_token_ids for each in engine.requests]
    for each in found:
        Rendered.model_validate(each, strict=True)
        assert each["sampling_params"] == {"max_tokens": 3} | {
            name: body[name] for name in ("temperature",) if name in body
        }


async def test_a_full_queue_renders_and_a_refused_request_is_refused_in_its_own_words(client, engine):
    engine.full_up_to = 0
    assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 429
    assert (await client.post("/v1/completions/render", json={"prompt": "hi"})).status_code == 200
    engine.full_up_to = None
    for path, body in (
        ("/v1/chat/completions", {"messages": TURNS, "model": "gpt-4"}),
        ("/v1/completions", {"prompt": [10**6]}),
        ("/v1/messages", {"messages": [], "model": "fake", "max_tokens": 3}),
    ):
        rendered, asked = await client.post(f"{path}/render", json=body), await client.post(path, json=body)
        assert rendered.status_code == asked.status_code >= 400
        assert rendered.json()["error"]["message"] == asked.json()["error"]["message"]
