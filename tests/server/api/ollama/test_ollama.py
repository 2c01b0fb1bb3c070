"""Ollama's endpoints over HTTP: its words in, its lines out."""

import dataclasses
import json

import httpx
import orjson
import pytest

from engine.errors import RequestFailed
from engine.types import FinishReason
from server.api.ollama.embed import OllamaVector, OllamaVectors
from server.api.ollama.models import (
    OllamaError,
    OllamaLoadedList,
    OllamaModelList,
    OllamaModelPage,
    OllamaReply,
)
from tests.server.api.pooling.test_embeddings import EMBEDS
from tests.server.conftest import connect, impatient
from tests.server.fake_engine import INFO, FakeEngine

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = {"model": "fake:latest", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'


def lines(reply: httpx.Response) -> list[dict]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    found = [orjson.loads(line) for line in reply.text.splitlines()]
    for line in found:
        OllamaReply.model_validate(line, strict=True)
    return found


@pytest.fixture
def thinker(engine: FakeEngine) -> FakeEngine:
    """A model that thinks, says something, and calls."""
    engine.model_info = dataclasses.replace(
        INFO, chat_template="<tool_call></think>", max_model_len=4096, added_tokens={"</think>": 9}
    )
    engine.texts = ("<think>", "hm", "</think>", "I ", "look", *CALL)
    engine.end_as = FinishReason.STOP
    return engine


async def test_a_chat_comes_in_lines_and_adds_up_to_the_whole_reply(client, thinker):
    body = {**HELLO, "tools": [TOOL], "options": {"num_predict": len(thinker.texts)}}
    found = lines(await client.post(CHAT, json=body))
    whole = (await client.post(CHAT, json={**body, "stream": False})).json()
    OllamaReply.model_validate(whole, strict=True)
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    said = [line["message"] for line in found]
    assert "".join(message["content"] for message in said) == whole["message"]["content"]
    assert "".join(message.get("thinking", "") for message in said) == whole["message"]["thinking"] == "hm"
    calls = [{"function": {"name": "look", "arguments": {"at": "x"}}}]
    assert said[-2]["tool_calls"] == whole["message"]["tool_calls"] == calls
    assert found[-1]["eval_count"] == whole["eval_count"] == len(thinker.texts)
    assert found[-1]["done_reason"] == "stop"


async def test_arguments_that_are_nested_too_deep_end_there(client, thinker):
    deep = '{"a": ' * 300 + "1" + "}" * 300
    thinker.texts = (f'<tool_call>{{"name": "look", "arguments": {deep}}}</tool_call>',)
    body = {**HELLO, "tools": [TOOL], "options": {"num_predict": 1}}
    calls = lines(await client.post(CHAT, json=body))[0]["message"]["tool_calls"]
    assert json.dumps(calls[0]["function"]["arguments"]).count("{") == 64
    whole = (await client.post(CHAT, json={**body, "stream": False})).json()
    assert whole["message"]["tool_calls"] == calls


async def test_a_call_that_a_limit_cuts_off_is_left_out_since_clients_would_run_it(client, thinker):
    whole = '<tool_call>{"name": "look", "arguments": {"at": "y"}}</tool_call>'
    thinker.texts, thinker.end_as = (whole, *CALL.partition('"}')[0]), FinishReason.LENGTH
    body = {**HELLO, "tools": [TOOL], "options": {"num_predict": len(thinker.texts)}}
    *_, said, last = lines(await client.post(CHAT, json=body))
    assert said["message"]["tool_calls"] == [{"function": {"name": "look", "arguments": {"at": "y"}}}]
    assert last["done_reason"] == "length"
    reply = (await client.post(CHAT, json={**body, "stream": False})).json()
    assert reply["message"]["tool_calls"] == said["message"]["tool_calls"]


@pytest.mark.parametrize("media_type", [None, "application/x-www-form-urlencoded"])
async def test_bodies_need_no_media_type_as_in_ollamas_own_examples(client, media_type):
    headers = {} if media_type is None else {"content-type": media_type}
    for path in (CHAT, GENERATE, "/api/show"):
        assert (await client.post(path, content=orjson.dumps(HELLO), headers=headers)).status_code == 200


async def test_options_and_format_become_sampling_parameters(client, engine):
    options = {"temperature": 0.25, "repeat_penalty": 1.5, "seed": 7, "num_predict": 3, "stop": ["x"]}
    options["num_ctx"] = 9  # for Ollama's own engine
    body = {"model": "fake", "prompt": "hi", "system": "be brief", "options": options, "format": "json"}
    found = lines(await client.post(GENERATE, json=body))
    (request,) = engine.requests
    params = request.params
    assert (params.temperature, params.repetition_penalty, params.seed) == (0.25, 1.5, 7)
    assert (params.max_tokens, request.stop) == (3, ("x",))
    assert params.grammar is not None
    assert [message["role"] for message in engine.chats[0][0]] == ["system", "user"]
    assert "".join(line["response"] for line in found)
    assert found[-1]["done_reason"] == "length"


async def test_results_of_tools_find_the_calls_that_wait_for_them(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="<tool_call>", max_model_len=4096)
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("look", "hear")]
    messages = [
        *HELLO["messages"],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "hear", "content": "a bell"},
        {"role": "tool", "content": "a tower"},
    ]
    assert (await client.post(CHAT, json={**HELLO, "messages": messages})).status_code == 200
    rendered, _ = engine.chats[0]
    assert [(message["name"], message["content"]) for message in rendered[2:]] == [
        ("hear", "a bell"),
        ("look", "a tower"),
    ]


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (GENERATE, "prompt")])
async def test_a_request_without_words_asks_whether_the_model_is_loaded(client, engine, path, field):
    reply = (await client.post(path, json={"model": "fake"})).json()
    assert (reply["done"], reply["done_reason"]) == (True, "load")
    assert not engine.requests
    assert field not in reply


async def test_a_raw_prompt_is_gone_on_with_as_it_is(client, engine):
    options = {"num_predict": 3, "seed": 7}
    found = lines(await client.post(GENERATE, json={"prompt": "ab", "raw": True, "options": options}))
    (request,) = engine.requests
    assert request.prompt_token_ids == await engine.encode("ab")
    assert (request.params.max_tokens, request.params.seed) == (3, 7)
    assert not engine.chats
    assert "".join(line["response"] for line in found) == "ABA"
    assert (found[-1]["eval_count"], found[-1]["prompt_eval_count"]) == (3, len(request.prompt_token_ids))


async def test_a_suffix_is_the_other_side_of_the_hole(client, engine):
    engine.can_infill = True
    body = {"prompt": "a", "suffix": "z", "stream": False, "options": {"num_predict": 9999}}
    assert (await client.post(GENERATE, json=body)).json()["done"]
    (request,) = engine.requests
    assert request.prompt_token_ids == await engine.encode_infill("a", "z")
    assert request.params.max_tokens == INFO.max_model_len - len(request.prompt_token_ids)


async def test_more_tokens_than_the_context_window_leaves_are_cut_to_it(client, engine):
    await client.post(CHAT, json={**HELLO, "options": {"num_predict": 9999}})
    (request,) = engine.requests
    assert request.params.max_tokens == INFO.max_model_len - len(request.prompt_token_ids)


async def test_a_model_that_makes_vectors_makes_them_in_ollamas_words_too(client, engine):
    engine.model_info = dataclasses.replace(INFO, pooling=EMBEDS)
    plain = (await client.post("/v1/embeddings", json={"input": ["abc", "q"]})).json()
    vectors = [item["embedding"] for item in plain["data"]]
    reply = (await client.post("/api/embed", json={"model": "fake:latest", "input": ["abc", "q"]})).json()
    OllamaVectors.model_validate(reply, strict=True)
    assert (reply["embeddings"], reply["prompt_eval_count"]) == (vectors, plain["usage"]["prompt_tokens"])
    one = (await client.post("/api/embed", json={"input": "abc", "dimensions": 2})).json()
    assert one["embeddings"] == [vectors[0][:2]]
    older = (await client.post("/api/embeddings", json={"prompt": "abc"})).json()
    OllamaVector.model_validate(older, strict=True)
    assert older["embedding"] == vectors[0]
    for nothing in ({}, {"input": ""}, {"input": []}):
        reply = (await client.post("/api/embed", json={"model": "fake", **nothing})).json()
        assert reply["embeddings"] == []
    assert (await client.post("/api/embeddings", json={})).json() == {"embedding": []}


async def test_a_long_text_is_cut_unless_it_shall_not_be(client, engine):
    engine.model_info = dataclasses.replace(INFO, pooling=EMBEDS)
    body = {"input": "x" * (INFO.max_model_len + 1)}
    assert (await client.post("/api/embed", json=body)).status_code == 200
    reply = await client.post("/api/embed", json={**body, "truncate": False})
    assert reply.status_code == 400
    assert "128 at most" in reply.json()["error"]


async def test_the_model_is_listed_and_described(client, thinker):
    listed = (await client.get("/api/tags")).json()
    OllamaModelList.model_validate(listed, strict=True)
    assert [model["name"] for model in listed["models"]] == list(INFO.served_names)
    (digest,) = {model["digest"] for model in listed["models"]}
    assert len(bytes.fromhex(digest)) == 32
    assert {model["size"] for model in listed["models"]} == {INFO.weight_bytes}
    loaded = (await client.get("/api/ps")).json()
    OllamaLoadedList.model_validate(loaded, strict=True)
    assert [model["name"] for model in loaded["models"]] == list(INFO.served_names)
    page = (await client.post("/api/show", json={"model": "fake:latest"})).json()
    OllamaModelPage.model_validate(page, strict=True)
    assert page["capabilities"] == ["completion", "tools", "thinking"]
    assert page["model_info"]["fake.context_length"] == 4096
    assert (await client.get("/api/version")).json()["version"]


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        (CHAT, {**HELLO, "model": "other"}, 404, "'other'"),
        ("/api/show", {"model": "other"}, 404, "'other'"),
        (CHAT, {**HELLO, "options": {"temperature": 9}}, 400, "options.temperature"),
        (
            CHAT,
            {**HELLO, "messages": [{"role": "user", "content": "x", "images": ["aa"]}]},
            400,
            "messages[0].images[0]: the model 'fake' reads no pictures",
        ),
        (CHAT, {**HELLO, "options": {"num_predict": 5.5}}, 400, "options.num_predict"),
        (GENERATE, {"prompt": "x", "raw": True, "images": ["aa"]}, 400, "images"),
        (CHAT, {**HELLO, "messages": [{"role": "tool", "content": "x"}]}, 400, "no earlier call"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, 400, "system"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, 400, "no holes"),
        ("/api/embed", {"input": "x"}, 400, "generates text"),
        ("/api/embeddings", {"model": "other", "prompt": "x"}, 404, "'other'"),
        (GENERATE, {"prompt": "x", "format": "yaml"}, 400, "format"),
        (GENERATE, {"prompt": "x", "think": "much"}, 400, "think"),
    ],
)
async def test_what_is_wrong_is_said_in_ollamas_shape(client, engine, path, body, status, told):
    reply = await client.post(path, json=body)
    assert reply.status_code == status
    OllamaError.model_validate(reply.json(), strict=True)
    assert told in reply.json()["error"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (GENERATE, {"prompt": "x", "images": ["aa"]}, "images[0]: the model 'fake' reads no pictures"),
        (CHAT, {**HELLO, "format": {"title": "refuse"}}, "format: refused"),
        (GENERATE, {"prompt": "x", "raw": True, "format": {"title": "refuse"}}, "format: refused"),
    ],
)
async def test_a_refusal_by_the_path_of_chats_names_ollamas_field(client, path, body, said):
    assert (await client.post(path, json=body)).json()["error"] == said


async def test_a_whole_number_may_be_written_with_a_point(client, engine):
    options = {"num_predict": 2.0, "top_k": 5.0, "temperature": 1.0}
    assert (await client.post(CHAT, json={**HELLO, "options": options})).status_code == 200
    (request,) = engine.requests
    assert (request.params.max_tokens, request.params.top_k) == (2, 5)
    beyond = {**HELLO, "options": {"seed": -(2**63) - 1}}  # of which a float keeps 53 bits
    assert "seed" in (await client.post(CHAT, json=beyond)).json()["error"]


async def test_a_stream_that_breaks_ends_with_an_error_and_nothing_is_written_in_a_silence(engine):
    engine.error_after, engine.error, engine.pause_s = 1, RequestFailed("no"), 0.05
    async with connect(impatient(engine, keep_alive_s=0.005)) as client:
        reply = await client.post(CHAT, json=HELLO)
    found = [orjson.loads(line) for line in reply.text.splitlines()]
    assert list(found[-1]) == ["error"]
    assert len(found) == 2
