"""POST /v1/responses over HTTP: what goes in, what comes out, what is stored and for whom."""

import asyncio
import re
import time

import httpx
import orjson
import pytest

from engine.errors import RequestFailed
from engine.types import FinishReason
from server.api.chat.protocol import ChatCompletionRequest
from server.api.responses.models import InputTokens, ResponseDeletion, ResponseEvent, ResponseObject
from server.api.responses.protocol import PASSED_ON, ResponsesRequest
from server.app import build_app
from tests.server.conftest import Settings, connect

PATH = "/v1/responses"


def events(response: httpx.Response) -> list[dict]:
    """The payloads, after checking the frame around them."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    payloads = []
    for block in blocks:
        name, data = block.split("\n")
        payload = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        payloads.append(payload)
    assert [payload["sequence_number"] for payload in payloads] == list(range(len(payloads)))
    return payloads


def without_chance(stream: str) -> str:
    """The same stream with fixed ids and times."""
    stream = re.sub(r"\b(resp|msg|rs|fc|call)_[0-9a-f]+", r"\1_ID", stream)
    return re.sub(r'"(created_at|completed_at)":\d+', r'"\1":0', stream)


async def create(client: httpx.AsyncClient, **body) -> dict:
    reply = await client.post(PATH, json={"input": "hi", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def refused(client: httpx.AsyncClient, **body) -> dict:
    reply = await client.post(PATH, json={"input": "hi", **body})
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


async def test_the_tokens_of_its_prompt_are_counted_without_an_answer(client, engine):
    first = await create(client, input="ab", max_output_tokens=1)
    body = {"input": "hi", "instructions": "x", "previous_response_id": first["id"]}
    counted = (await client.post(f"{PATH}/input_tokens", json=body)).json()
    InputTokens.model_validate(counted, strict=True)
    assert len(engine.requests) == 1
    response = await create(client, **body, max_output_tokens=1)
    assert counted["input_tokens"] == response["usage"]["input_tokens"]
    assert (await client.options(f"{PATH}/input_tokens")).headers["allow"] == "POST"
    error = (await client.post(f"{PATH}/input_tokens", json={"input": []})).json()["error"]
    assert error["param"] == "input"


async def test_a_text_becomes_a_message(client, engine):
    engine.end_as = FinishReason.STOP
    response = await create(client, max_output_tokens=2, instructions="be brief")
    ResponseObject.model_validate(response, strict=True)
    assert response["id"].startswith("resp_")
    assert (response["status"], response["model"]) == ("completed", "fake")
    (message,) = response["output"]
    assert message["content"][0]["text"] == "BE"
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 2
    assert response["temperature"] == 0.5  # the checkpoint's, since none was asked for
    messages, _ = engine.chats[-1]
    assert messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("end_as", "reason"),
    [(FinishReason.LENGTH, "max_output_tokens"), (FinishReason.EXPIRED, "timeout")],
)
async def test_what_was_cut_off_is_incomplete_and_says_why(client, engine, end_as, reason):
    engine.end_as = end_as
    response = await create(client, max_output_tokens=2)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": reason}
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None


async def test_items_are_messages_in_their_order(client, engine):
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "user", "content": "b"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}],
        },
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "d"}, {"type": "input_text", "text": "e"}],
        },
    ]
    await create(client, input=items)
    messages, _ = engine.chats[-1]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("user", [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]),
    ]


async def test_a_stream_tells_each_thing_once_and_in_order(client, engine):
    engine.end_as = FinishReason.STOP
    reply = await client.post(PATH, json={"input": "hi", "max_output_tokens": 3, "stream": True})
    stream = events(reply)
    for event in stream:
        ResponseEvent.model_validate(event, strict=True)
    assert [event["type"].removeprefix("response.") for event in stream] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event["delta"] for event in stream if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == stream[-4]["text"] == "HIH"
    assert stream[0]["response"]["output"] == []
    assert stream[-2]["item"] == stream[-1]["response"]["output"][0]
    retrieved = await client.get(f"{PATH}/{stream[-1]['response']['id']}")
    assert retrieved.json() == stream[-1]["response"]


async def test_a_stream_that_breaks_ends_with_a_failed_response(client, engine):
    engine.error_after, engine.error = 2, RequestFailed("logits are not finite")
    reply = await client.post(PATH, json={"input": "hi", "stream": True})
    *_, done, failed = events(reply)
    assert done["item"]["status"] == "incomplete"
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert "logits" not in failed["response"]["error"]["message"]
    assert (await client.get(f"{PATH}/{failed['response']['id']}")).status_code == 404


async def test_logprobs_come_where_they_are_asked_for(client):
    plain = await create(client, max_output_tokens=1)
    assert plain["output"][0]["content"][0]["logprobs"] == []
    for asked in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}):
        response = await create(client, max_output_tokens=1, **asked)
        (token,) = response["output"][0]["content"][0]["logprobs"]
        assert (token["token"], len(token["top_logprobs"])) == ("H", response["top_logprobs"])
    reply = await client.post(
        PATH, json={"input": "hi", "stream": True, "top_logprobs": 1, "max_output_tokens": 2}
    )
    stream = events(reply)
    assert stream[3]["part"]["logprobs"] == []
    assert [len(event["logprobs"]) for event in stream if "delta" in event] == [1, 1]


async def test_the_terms_of_service_are_those_of_a_chat(client, engine):
    await create(client, priority=-3, timeout=7.5, cache_salt="s", user="u", seed=9, top_k=5)
    request = engine.requests[-1]
    assert (request.terms.priority, request.terms.cache_salt, request.terms.tenant) == (-3, "s", "u")
    assert request.terms.time_limits.total_s == 7.5
    assert (request.params.seed, request.params.top_k) == (9, 5)


# Stored responses.


async def test_a_chain_of_responses_is_one_conversation(client, engine):
    first = await create(client, input="ab", max_output_tokens=2, instructions="x")
    second = await create(client, input="cd", max_output_tokens=2, previous_response_id=first["id"])
    await create(client, input="ef", previous_response_id=second["id"])
    messages, _ = engine.chats[-1]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "ab"),
        ("assistant", "XA"),
        ("user", "cd"),
        ("assistant", "AB"),
        ("user", "ef"),
    ]


async def test_a_response_can_be_retrieved_until_it_is_deleted(client):
    response = await create(client, metadata={"k": "v"})
    assert response["store"]
    assert response["metadata"] == {"k": "v"}
    place = f"{PATH}/{response['id']}"
    assert (await client.get(place)).json() == response
    deletion = await client.delete(place)
    ResponseDeletion.model_validate(deletion.json(), strict=True)
    for reply in (await client.get(place), await client.delete(place)):
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "response_not_found"
    error = await refused(client, previous_response_id=response["id"])
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


async def test_another_method_is_told_what_there_is(client):
    reply = await client.put(f"{PATH}/resp_1")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "DELETE, GET"


async def test_what_shall_not_be_stored_is_not(client):
    response = await create(client, store=False)
    assert not response["store"]
    assert (await client.get(f"{PATH}/{response['id']}")).status_code == 404


async def test_a_server_without_a_store_says_so(engine):
    async with connect(build_app(engine, Settings(responses_store_bytes=0))) as client:
        response = await create(client)
        assert not response["store"]
        assert (await client.get(f"{PATH}/{response['id']}")).status_code == 404
        assert (await refused(client, store=True))["param"] == "store"


async def test_a_response_is_there_only_for_the_key_that_made_it(engine):
    async with connect(build_app(engine, Settings(api_keys=("mine", "yours")))) as client:
        mine = {"authorization": "Bearer mine"}
        yours = {"authorization": "Bearer yours"}
        response = (
            await client.post(PATH, json={"input": "hi", "max_output_tokens": 2}, headers=mine)
        ).json()
        place = f"{PATH}/{response['id']}"
        assert (await client.get(place, headers=yours)).status_code == 404
        assert (await client.delete(place, headers=yours)).status_code == 404
        body = {"input": "go on", "previous_response_id": response["id"]}
        assert (await client.post(PATH, json=body, headers=yours)).status_code == 400
        assert (await client.post(PATH, json=body, headers=mine)).status_code == 200
        assert (await client.get(place, headers=mine)).status_code == 200


async def test_a_client_that_leaves_leaves_no_response_behind(app, engine):
    engine.stall_after = 1
    async with connect(app) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.post(PATH, json={"input": "hi"}), 0.2)
    assert len(app.state.response_store._entries) == 0


# Truncation.


async def test_with_truncation_the_oldest_turns_go_and_the_system_message_stays(client, engine):
    turns = [
        {"role": role, "content": f"{place:02d}" * 5} for place in range(10) for role in ("user", "assistant")
    ]
    items = [{"role": "system", "content": "s" * 20}, *turns, {"role": "user", "content": "last"}]
    response = await create(client, input=items, truncation="auto", max_output_tokens=24)
    messages, _ = engine.chats[-1]
    contents = [message["content"] for message in messages]
    # 128 tokens of context, 24 for the reply, 24 for the first and the last: room for 4 turns of 20.
    assert contents == ["s" * 20, *[f"{place:02d}" * 5 for place in range(6, 10) for _ in range(2)], "last"]
    assert response["usage"]["input_tokens"] == 104
    body = {"input": items, "truncation": "auto", "max_output_tokens": 24}
    counted = (await client.post(f"{PATH}/input_tokens", json=body)).json()
    assert counted["input_tokens"] == 104


async def test_a_long_conversation_is_cut_without_holding_up_others(engine):
    items = [{"role": "user", "content": f"{place % 10}"} for place in range(4000)]
    app = build_app(engine, Settings(max_body_bytes=2**20))
    async with connect(app) as client:
        longest_s, last_s = 0.0, time.thread_time()
        asking = asyncio.create_task(create(client, input=items, truncation="auto", max_output_tokens=100))
        while not asking.done():
            await asyncio.sleep(0)
            now_s = time.thread_time()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert len(engine.chats[-1][0]) == 28
    assert (await asking)["usage"]["input_tokens"] == 28
    assert longest_s < 2.5  # measured 0.1 to 0.5; building every shorter conversation at once took over 5


async def test_without_truncation_too_long_is_an_error(client):
    error = await refused(client, input="x" * 200)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    error = await refused(client, input="x" * 20, max_output_tokens=120)
    assert (error["param"], error["code"]) == ("max_output_tokens", "context_length_exceeded")
    assert "max_completion_tokens" not in error["message"]
    error = await refused(client, input="x" * 200, truncation="auto")
    assert error["code"] == "context_length_exceeded"


# Refusals.


TOOL = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,aa"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"stop": ["x"] * 17}, "stop"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"max_tokens": 4}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"include": [1]}, "include[0]"),
        ({"tools": [{"type": "teapot"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tool_choice": {"type": {}}}, "tool_choice.type"),
        ({"tool_choice": ["auto"]}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f", "mode": "auto"}},
            "tool_choice.mode",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.type"),
        (
            {"tools": [TOOL], "tool_choice": ALLOWED | {"tools": [TOOL, TOOL | {"type": "custom"}]}},
            "tool_choice.tools[1].type",
        ),
        ({"truncation": "middle"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "tools[7]"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            {"input": [{"role": "user", "content": [PICTURE | {"file_id": "f"}]}]},
            "state",
        ),
        ({"input": [{"role": "user", "content": [PICTURE]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"metadata": {f"{number}": "v" for number in range(17)}}, "metadata"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_the_name_the_caller_used(client, body, param):
    error = await refused(client, **body)
    assert error["param"] == param
    assert error["message"]
    assert "or image_url" not in error["message"]


async def test_variables_that_the_template_does_not_read_are_named(client):
    body = {"input": "hi", "chat_template_kwargs": {"style": "plain"}}
    for path in (PATH, f"{PATH}/input_tokens"):
        reply = await client.post(path, json=body)
        assert reply.headers["x-tokenyard-ignored"] == "chat_template_kwargs.style"


@pytest.mark.parametrize(
    ("body", "instead"),
    [({"n_predict": 4}, "max_output_tokens"), ({"json_schema": {}}, "text.format")],
)
async def test_a_field_of_other_servers_is_refused_with_the_name_of_ours(client, body, instead):
    assert instead in (await refused(client, **body))["message"]


def test_fields_that_a_chat_has_too_have_the_same_bounds_here():
    ours = ResponsesRequest.model_json_schema()["properties"]
    theirs = ChatCompletionRequest.model_json_schema()["properties"]
    for name in (
        *PASSED_ON,
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "top_logprobs",
    ):
        assert ours[name] == theirs[name], name


async def test_fields_of_vllm_mean_what_they_mean_for_a_chat(client, engine):
    body = {"logit_bias": {"7": 2}, "stop": "end", "include_stop_str_in_output": True}
    await create(client, **body, skip_special_tokens=False, structured_outputs={"choice": ["a", "b"]})
    (request,) = engine.requests
    assert (request.stop, request.include_stop_str_in_output) == (("end",), True)
    assert not request.skip_special_tokens
    assert request.params.logit_bias == ((7, 2.0),)
    assert request.params.grammar is not None
    await create(client, ignore_eos=True)
    assert not engine.requests[-1].params.stop_token_ids


async def test_a_body_without_input_is_told_so(client):
    reply = await client.post(PATH, json={"model": "fake"})
    assert reply.json()["error"]["param"] == "input"
    assert (await client.post(PATH, json={"input": "x", "model": "none"})).status_code == 404
