"""With --strict-fields, a field that nobody knows is refused by its name, wherever it stands."""

from collections.abc import AsyncIterator

import httpx
import pytest

from server.app import build_app
from tests.server.conftest import Settings, connect

MESSAGE = {"role": "user", "content": "x"}


@pytest.fixture
async def strict(engine) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(build_app(engine, Settings(strict_fields=True))) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "frobnicate": 1}, "frobnicate"),
        ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"a": 1}}, "stream_options.a"),
        ("/v1/chat/completions", {"messages": [MESSAGE], "max_token": 1}, "max_token"),
        ("/v1/chat/completions", {"messages": [{**MESSAGE, "mood": "?"}]}, "messages[0].mood"),
        ("/tokenize", {"prompt": "x", "text": "y"}, "text"),
        ("/detokenize", {"tokens": [], "ids": []}, "ids"),
    ],
)
async def test_an_unknown_field_is_named(strict, path, body, param):
    response = await strict.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "unknown_parameter")


@pytest.mark.parametrize(("num_faults", "param"), [(1000, "messages[0].x0"), (1001, None)])
async def test_of_very_many_faults_none_is_named_since_the_validator_would_list_all(
    strict, num_faults, param
):
    unknown = {f"x{number}": 1 for number in range(num_faults)}
    response = await strict.post("/v1/chat/completions", json={"messages": [{**MESSAGE, **unknown}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_without_it_the_same_is_counted_and_ignored(client, engine):
    response = await client.post("/v1/completions", json={"prompt": "x", "frobnicate": 1})
    assert response.status_code == 200
    value = engine.metrics.registry.get_sample_value("tokenyard:unknown_request_fields_total")
    assert value == 1


async def test_known_harmless_and_absent_fields_are_no_mistake(strict):
    body = {"prompt": "x", "store": False, "use_beam_search": False, "user": "ada", "nothing": None}
    assert (await strict.post("/v1/completions", json=body)).status_code == 200


async def test_fields_from_headers_are_none_of_a_body_that_has_no_use_for_them(strict):
    headers = {"x-tokenyard-priority": "3"}
    assert (await strict.post("/tokenize", json={"prompt": "x"}, headers=headers)).status_code == 200
    assert (await strict.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200


OFF = {"type": "disabled"}
STYLE = {"chat_template_kwargs": {"style": "plain"}}
HINTS = [
    ("/v1/chat/completions", {"messages": [MESSAGE], "store": True}, "store"),
    ("/v1/chat/completions", {"messages": [MESSAGE], "verbosity": "low"}, "verbosity"),
    ("/v1/completions", {"prompt": "x", "service_tier": "flex"}, "service_tier"),
    (
        "/v1/chat/completions",
        {"messages": [MESSAGE], "chat_template_kwargs": {"known": 1, "mood": 1}},
        "chat_template_kwargs.mood",
    ),
    (
        "/tokenize",
        {"messages": [MESSAGE], "chat_template_kwargs": {"mood": 1}},
        "chat_template_kwargs.mood",
    ),
    ("/v1/responses", {"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
    (
        "/v1/responses",
        {"input": "x", "include": ["file_search_call.results"]},
        "include.file_search_call.results",
    ),
    ("/v1/responses", {"input": "x", "max_tool_calls": 3}, "max_tool_calls"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools.web_search"),
    (
        "/v1/responses",
        {"input": [MESSAGE, {"type": "web_search_call", "action": 1}]},
        "input.web_search_call",
    ),
    ("/v1/messages", {"messages": [MESSAGE], "max_tokens": 1, "service_tier": "fast"}, "service_tier"),
    ("/v1/messages", {"messages": [MESSAGE], "max_tokens": 1, "thinking": OFF}, "thinking.type"),
    ("/v1/messages/count_tokens", {"messages": [MESSAGE], "thinking": OFF}, "thinking.type"),
    ("/v1/messages/render", {"messages": [MESSAGE], "max_tokens": 1, "thinking": OFF}, "thinking.type"),
    ("/v1/chat/completions/render", {"messages": [MESSAGE], **STYLE}, "chat_template_kwargs.style"),
    ("/tokenize", {"messages": [MESSAGE], **STYLE}, "chat_template_kwargs.style"),
    ("/tokenize", {"messages": [MESSAGE], "thinking": OFF}, "thinking.type"),
    ("/api/chat", {"messages": [MESSAGE], "think": False, "stream": False}, "think"),
    ("/api/generate", {"prompt": "x", "think": True, "stream": False}, "think"),
    ("/api/generate", {"prompt": "x", "think": True, "raw": True, "stream": False}, "think"),
]


@pytest.mark.parametrize(("path", "body", "name"), HINTS)
async def test_a_hint_is_ignored_counted_and_named(client, engine, path, body, name):
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-tokenyard-ignored"] == name
    counted = engine.metrics.registry.get_sample_value(
        "tokenyard:ignored_request_fields_total", {"field": name.partition(".")[0]}
    )
    assert counted == 1


@pytest.mark.parametrize(("path", "body", "name"), HINTS)
async def test_a_strict_server_refuses_a_hint_by_its_name(strict, path, body, name):
    reply = await strict.post(path, json=body)
    assert reply.status_code == 400
    assert f"{name} has no effect" in reply.text


async def test_many_hints_are_one_header_of_a_bounded_length(client):
    tools = [{"type": f"web_search_{'é' * 40}{number}"} for number in range(40)]
    reply = await client.post("/v1/responses", json={"input": "x", "tools": tools, "max_tool_calls": 1})
    names = reply.headers["x-tokenyard-ignored"].split(", ")
    assert names[0] == "max_tool_calls"
    assert len(names) == 16
    assert all(len(name) <= 64 and name.isascii() for name in names)
