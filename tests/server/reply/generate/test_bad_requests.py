"""Whatever is wrong with a request, the answer is a 4xx in OpenAI's shape that says what would be right."""

import asyncio
import json
import threading
from dataclasses import replace

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import Overloaded, RequestRejected
from server.api.chat.protocol import ChatCompletionRequest
from server.api.completions.protocol import CompletionRequest
from server.app import build_app
from server.edge.http import json_body
from server.edge.http.endpoint import ErrorReplyBody
from server.edge.http.json_body import parse_object
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def check(response: httpx.Response) -> dict:
    assert 400 <= response.status_code < 500, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-request-id"]
    error = ErrorReplyBody.model_validate(response.json(), strict=True).error
    assert len(error.message) <= 400
    return error.model_dump()


BAD_FIELDS = [
    ({}, "prompt", "missing_field"),
    ({"prompt": None}, "prompt", "missing_field"),
    ({"prompt": 5}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": "nul\0"}, "prompt", "invalid_value"),
    ({"prompt": [True]}, "prompt", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_value"),
    ({"prompt": [1.0]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [300]}, "prompt", "invalid_value"),
    ({"prompt": [2**63]}, "prompt", "invalid_value"),
    ({"prompt": [[1], [2**64 - 1]]}, "prompt", "invalid_value"),
    ({"prompt": ["x"] * 129}, "prompt", "invalid_value"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_value"),
    ({"prompt": "x" * 128}, "prompt", "context_length_exceeded"),
    ({"prompt": "x" * 40_000}, "prompt", "context_length_exceeded"),
    ({"max_tokens": 128}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 2**31 - 1}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    ({"max_tokens": "16"}, "max_tokens", "invalid_value"),
    ({"max_tokens": True}, "max_tokens", "invalid_value"),
    ({"max_tokens": 2**70}, "max_tokens", "invalid_value"),
    ({"min_tokens": 17}, "min_tokens", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"best_of": 0}, "best_of", "invalid_value"),
    ({"n": 2, "best_of": 1}, "best_of", "invalid_value"),
    ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    ({"top_p": -0.1}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"min_p": 1.1}, "min_p", "invalid_value"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"070": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"bad_words": [""]}, "bad_words[0]", "invalid_value"),
    ({"bad_words": "word"}, "bad_words", "invalid_value"),
    ({"bad_words": ["x"] * 129}, "bad_words", "invalid_value"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids", "invalid_value"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    ({"return_token_ids": 1}, "return_token_ids", "invalid_value"),
    ({"stop": [""]}, "stop[0]", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": [1]}, "stop[0]", "invalid_value"),
    ({"stop": "x" * 1025}, "stop[0]", "invalid_value"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"stream": 1}, "stream", "invalid_value"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "invalid_value",
    ),
    ({"priority": 2**31}, "priority", "invalid_value"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"cache_salt": "x" * 257}, "cache_salt", "invalid_value"),
    ({"user": "x" * 513}, "user", "invalid_value"),
    ({"user": 5}, "user", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
    ({"model": 5}, "model", "invalid_value"),
    ({"model": "x" * 257}, "model", "invalid_value"),
    ({"model": "gpt-4"}, "model", "model_not_found"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    ({"logits_processors": ["x"]}, "logits_processors", "unsupported_parameter"),
    ({"prompt_embeds": "x"}, "prompt_embeds", "unsupported_parameter"),
    ({"truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ({"guided_json": {}}, "guided_json", "unsupported_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS)
async def test_a_bad_field_of_a_completion_is_named(client, engine, fields, param, code):
    body = fields if not fields else {"prompt": "x", **fields}
    error = check(await client.post(COMPLETIONS, content=json.dumps(body).encode()))
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert engine.requests == []


def message(**fields):
    return {"messages": [{"role": "user", "content": "x", **fields}]}


PART = "messages[0].content[0]"
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def choice(name):
    return {"type": "function", "function": {"name": name}}


BAD_CHATS = [
    ({"messages": None}, "messages", "missing_field"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_value"),
    ({"messages": [{}]}, "messages[0].role", "missing_field"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_field"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_value"),
    (message(role="tool"), "messages[0].tool_call_id", "missing_field"),
    (message(role="function"), "messages[0].role", "unsupported_parameter"),
    (message(role="wizard"), "messages[0].role", "unsupported_parameter"),
    (message(role=1), "messages[0].role", "invalid_value"),
    (message(content=5), "messages[0].content", "invalid_value"),
    (message(content=[5]), "messages[0].content[0]", "invalid_value"),
    (
        message(content=[{"type": "image_url", "image_url": "data:,x"}]),
        f"{PART}.type",
        "unsupported_parameter",
    ),
    (message(content=[{"type": "image_url", "image_url": {}}]), f"{PART}.image_url.url", "missing_field"),
    (message(content=[{"type": "input_audio"}]), f"{PART}.type", "unsupported_parameter"),
    (message(content=[{"type": "text"}]), "messages[0].content[0].text", "missing_field"),
    (message(content=[]), "messages[0].content", "invalid_value"),
    (message(content="x" * 128), "messages", "context_length_exceeded"),
    (message(content="x" * 33_000), "messages", "context_length_exceeded"),
    (message(name="x" * 65), "messages[0].name", "invalid_value"),
    (message(tool_calls=[{}]), "messages[0].tool_calls[0].id", "missing_field"),
    (message(tool_calls=[CALL]), "messages[0].tool_calls", "invalid_value"),
    (
        message(role="assistant", tool_calls=[{**CALL, "id": "x" * 257}]),
        "messages[0].tool_calls[0].id",
        "invalid_value",
    ),
    (message(role="assistant", tool_calls=[CALL] * 129), "messages[0].tool_calls", "invalid_value"),
    (
        message(role="assistant", tool_calls=[{**CALL, "type": "custom"}]),
        "messages[0].tool_calls[0].type",
        "invalid_value",
    ),
    (message(tool_call_id="a"), "messages[0].tool_call_id", "invalid_value"),
    (message(reasoning="a"), "messages[0].reasoning", "invalid_value"),
    (message(function_call={"name": "f"}), "messages[0].function_call", "unsupported_parameter"),
    (
        message(content=[{"type": "refusal", "refusal": "no"}]),
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    (message(content=[{"type": "input_audio"}]), "messages[0].content[0].type", "unsupported_parameter"),
    (message(content=[{"type": "file"}]), "messages[0].content[0].type", "unsupported_parameter"),
    (
        message(role="assistant", content=[{"type": "refusal"}]),
        "messages[0].content[0].refusal",
        "missing_field",
    ),
    (message(content=None), "messages[0].content", "missing_field"),
    (message(audio={"id": "x"}), "messages[0].audio", "unsupported_parameter"),
    ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logprobs": 5}, "logprobs", "invalid_value"),
    ({"max_completion_tokens": 128}, "max_completion_tokens", "context_length_exceeded"),
    ({"max_tokens": 128}, "max_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 1, "max_tokens": 2}, "max_tokens", "invalid_value"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "invalid_value",
    ),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_field"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "invalid_value"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [tool("x" * 129)]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [tool("")]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name", "invalid_value"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "invalid_value"),
    ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters", "invalid_value"),
    ({"tools": [tool("f", parameters={"type": "array"})]}, "tools[0].function.parameters", "invalid_value"),
    ({"tools": {"f": 1}}, "tools", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "any"}, "tool_choice.type", "invalid_value"),
    ({"tool_choice": 5}, "tool_choice", "invalid_value"),
    ({"tools": [tool("f")], "tool_choice": {"type": "custom"}}, "tool_choice.type", "invalid_value"),
    ({"tools": [tool("f")], "tool_choice": {"type": "function"}}, "tool_choice.function", "missing_field"),
    ({"tool_choice": choice("f") | {"type": "auto"}}, "tool_choice.function", "invalid_value"),
    ({"tools": [tool("f")], "tool_choice": choice("g")}, "tool_choice.function.name", "invalid_value"),
    ({"tool_choice": choice("g")}, "tool_choice.function.name", "invalid_value"),
    (
        {"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}},
        "tool_choice.allowed_tools",
        "missing_field",
    ),
    (
        {
            "tools": [tool("f")],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [choice("g")]},
            },
        },
        "tool_choice.allowed_tools.tools[0].function.name",
        "invalid_value",
    ),
    (
        {"tools": [tool("f")], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
        "invalid_value",
    ),
    (
        {"tools": [tool("f", description="refuse")], "tool_choice": "required", "ignore_eos": True},
        "ignore_eos",
        "invalid_value",
    ),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_value"),
    ({"include_reasoning": 0}, "include_reasoning", "invalid_value"),
    ({"functions": [{}]}, "functions", "unsupported_parameter"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "alloy"}}, "audio", "unsupported_parameter"),
    ({"prediction": {}}, "prediction.type", "missing_field"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"reasoning_effort": "utmost"}, "reasoning_effort", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_CHATS)
async def test_a_bad_field_of_a_chat_is_named(client, engine, fields, param, code):
    error = check(await client.post(CHAT, json={**message(), **fields}))
    assert (error["param"], error["code"]) == (param, code)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "ab~"}, "prompt"),
        (COMPLETIONS, {"prompt": [97, 126]}, "prompt"),
        (CHAT, message(content="ab~"), "messages"),
    ],
)
async def test_a_token_without_an_embedding_is_refused_however_it_came(client, engine, path, body, param):
    engine.model_info = replace(engine.model_info, vocab_size=ord("~"))
    error = check(await client.post(path, json=body))
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert "from 0 to 125" in error["message"]
    assert engine.requests == []


async def test_the_bound_is_in_the_message(client):
    error = check(await client.post(COMPLETIONS, json={"prompt": "x", "temperature": 3}))
    assert error["message"] == "temperature: must be less than or equal to 2"
    error = check(await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1000}))
    assert "1 tokens" in error["message"]
    assert "1000" in error["message"]
    assert "128" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt: must have at most 128 prompts, not 129"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop: must have at most 16 items, not 17"),
        (COMPLETIONS, {"stop": [""]}, "stop[0]: must have at least 1 character"),
        (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids: must have at least 1 item, not 0"),
        (COMPLETIONS, {"user": "x" * 513}, "user: must have at most 512 characters"),
        (COMPLETIONS, {"logit_bias": [1]}, "logit_bias: must be an object"),
        (
            COMPLETIONS,
            {"logit_bias": {"1_0": 1, "3": 1, "300": 1}},
            "the keys of logit_bias must be token ids from 0 to 299, as strings, not '1_0', '300': the"
            " vocabulary has 300",
        ),
        (COMPLETIONS, {"prompt": [1, 300]}, "token ids must be from 0 to 299, not 300 (out of vocabulary)"),
        (
            COMPLETIONS,
            {"seed": 2**63},
            f"seed: must be from {-(2**63)} to {2**63 - 1}, not {2**63}",
        ),
        (
            COMPLETIONS,
            {"use_beam_search": True},
            "use_beam_search is not supported by this server: every choice is sampled by itself: ask for"
            " several with n, or best_of in completions",
        ),
        (COMPLETIONS, {"stop": 5}, "stop: must be a list"),
        (COMPLETIONS, {"stream_options": []}, "stream_options: must be an object"),
        (CHAT, {"messages": []}, "messages: must have at least 1 item, not 0"),
        (CHAT, {"response_format": "json"}, "response_format: must be an object"),
        (
            CHAT,
            {"tools": [tool("a b")]},
            "tools[0].function.name: must match pattern '^[A-Za-z0-9_.-]+$'",
        ),
    ],
)
async def test_what_is_wrong_is_said_in_the_words_of_json(client, path, fields, told):
    error = check(await client.post(path, json={"prompt": "x", **message(), **fields}))
    assert error["message"] == told


BAD_BODIES = [
    b"",
    b" ",
    b"{",
    b"nonsense",
    b"null",
    b"[]",
    b'"prompt"',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'\xef\xbb\xbf{"prompt": "x"}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "x",}',
    b'{"prompt": "x"} {}',
    b'{"prompt": "x", "prompt": "y"}',
    b'{"prompt": "x", "stream_options": {"a": 1, "a": 2}}',
    b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b', "prompt": "x"}',
    b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b'{"metadata": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
]


@pytest.mark.parametrize("raw", BAD_BODIES, ids=range(len(BAD_BODIES)))
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_is_not_beyond_doubt_json_is_refused(client, path, raw):
    response = await client.post(path, content=raw, headers={"content-type": "application/json"})
    error = check(response)
    assert (response.status_code, error["code"]) == (400, "invalid_json")


async def test_a_large_bad_body_is_refused_with_a_small_answer(client):
    response = await client.post(
        COMPLETIONS, json={"prompt": "x", "metadata": {str(i): i for i in range(4000)}}
    )
    check(response)
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        (None, 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_the_body_must_not_claim_to_be_something_else(client, content_type, status):
    headers = {"content-type": content_type} if content_type else {}
    response = await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == status
    if status == 415:
        assert check(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(("encoding", "status"), [("identity", 200), ("gzip", 415), ("br, identity", 415)])
async def test_nothing_is_unpacked(client, encoding, status):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == status
    if status == 415:
        assert "must not be compressed" in check(response)["message"]


@pytest.mark.parametrize("value", ["", "x", "NaN", "true", "[1]", "[" * 50_000, '{"a":' * 9_000, "1" * 400])
@pytest.mark.parametrize("name", ["x-tokenyard-priority", "x-tokenyard-timeout", "x-priority"])
async def test_a_header_that_stands_for_a_field_must_be_a_number(client, name, value):
    response = await client.post(COMPLETIONS, json={"prompt": "x"}, headers={name: value})
    assert check(response)["code"] == "invalid_value"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    sorted({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, "tools"})
)
NEARLY = st.dictionaries(FIELDS, JSON, max_size=5).map(
    lambda body: {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **body}
)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=NEARLY | JSON, raw=st.none() | st.binary(max_size=40))
async def test_no_body_whatsoever_makes_the_server_fail(path, body, raw):
    app = build_app(FakeEngine(), Settings())
    content = json.dumps(body).encode(errors="surrogatepass") if raw is None else raw
    async with connect(app) as client:
        response = await client.post(path, content=content)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        check(response)
    elif response.headers["content-type"] == "application/json":
        orjson.loads(response.content)


@pytest.mark.parametrize("item", ["[]", "{}", "0", '""', '{"a":[]}'])
def test_a_body_of_very_many_items_is_refused_before_any_is_built(item: str, monkeypatch) -> None:
    monkeypatch.setattr(json_body.orjson, "loads", None)
    body = '{"other":[' + ",".join([item] * (json_body.MAX_ITEMS + 1)) + "]}"
    with pytest.raises(RequestRejected, match=f"more than {json_body.MAX_ITEMS} items"):
        parse_object(body.encode())


@pytest.mark.parametrize("text", [",[{" * 300_000, '\\"' * 300_000, "\\\\" * 300_000])
def test_a_text_may_have_as_many_commas_and_brackets_as_it_likes(text: str) -> None:
    assert parse_object(('{"prompt":"' + text + '"}').encode())["prompt"]


def test_as_many_items_as_are_allowed_are_read() -> None:
    body = '{"other":[' + ",".join(["0"] * (json_body.MAX_ITEMS - 2)) + "]}"
    assert len(parse_object(body.encode())["other"]) == json_body.MAX_ITEMS - 2


async def test_of_many_large_bodies_some_are_sent_away_and_small_ones_are_read(monkeypatch) -> None:
    gate = threading.Event()
    waiting = [asyncio.create_task(json_body._in_large_lane(lambda _: gate.wait())) for _ in range(20)]
    await asyncio.sleep(0.05)
    gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [bool] * 16 + [Overloaded] * 4


async def test_behind_each_part_of_a_large_body_the_event_loop_has_the_interpreter(
    engine: FakeEngine, monkeypatch
) -> None:
    rests = []
    monkeypatch.setattr(json_body.time, "sleep", rests.append)
    async with connect(build_app(engine, Settings(max_body_bytes=1 << 20))) as client:
        await client.post(COMPLETIONS, json={"prompt": "x" * 100_000})
    assert len(rests) == 2, "behind parsing, and behind all"
    assert all(0 < rest_s <= json_body._LONGEST_REST_S for rest_s in rests)
