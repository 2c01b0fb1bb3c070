"""POST /v1/messages over HTTP: Anthropic's words in, Anthropic's words out."""

import dataclasses

import httpx
import orjson
import pytest

from engine.errors import RequestFailed, RequestRejected
from engine.types import FinishReason
from server.api.anthropic.messages import AnthropicErrorBody, AnthropicEvent, AnthropicMessage
from server.app import build_app
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import INFO, FakeEngine

PATH = "/v1/messages"
ASK = {"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {
    "name": "look",
    "description": "looks",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'


@pytest.fixture
def thinker(engine: FakeEngine) -> FakeEngine:
    """A model that thinks, says something, and calls."""
    engine.model_info = dataclasses.replace(
        INFO, chat_template="<tool_call></think>", max_model_len=4096, added_tokens={"</think>": 9}
    )
    engine.texts = ("<think>", "hm", "</think>", "I ", "look", *CALL)
    engine.end_as = FinishReason.STOP
    return engine


async def create(client: httpx.AsyncClient, **body) -> dict:
    reply = await client.post(PATH, json={**ASK, **body})
    assert reply.status_code == 200, reply.text
    message = reply.json()
    AnthropicMessage.model_validate(message, strict=True)
    return message


async def refused(client: httpx.AsyncClient, status: int = 400, path: str = PATH, **body) -> dict:
    reply = await client.post(path, json={**ASK, **body})
    assert reply.status_code == status, reply.text
    AnthropicErrorBody.model_validate(reply.json(), strict=True)
    return reply.json()["error"]


def events(text: str) -> list[dict]:
    """The payloads, after checking the frame around them."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    payloads = []
    for block in blocks:
        name, data = block.split("\n")
        payload = orjson.loads(data.removeprefix("data: "))
        AnthropicEvent.model_validate(payload, strict=True)
        assert name == f"event: {payload['type']}"
        payloads.append(payload)
    return payloads


async def test_a_message_is_answered_and_its_tokens_are_counted(client, engine):
    engine.end_as = FinishReason.STOP
    message = await create(client, model="fake", system=[{"type": "text", "text": "be brief"}])
    assert message["content"] == [{"type": "text", "text": message["content"][0]["text"]}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    prompt, _ = engine.chats[0]
    assert [turn["role"] for turn in prompt] == ["system", "user"]
    num_prompt = len(engine.requests[0].prompt_token_ids)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_prompt


@pytest.mark.parametrize(
    ("end", "stopped_by", "reason"),
    [
        (FinishReason.LENGTH, None, "max_tokens"),
        (FinishReason.EXPIRED, None, "max_tokens"),
        (FinishReason.STOP, "END", "stop_sequence"),
        (FinishReason.STOP, 7, "end_turn"),
    ],
)
async def test_each_end_has_anthropics_name(client, engine, end, stopped_by, reason):
    engine.end_as, engine.stop_reason = end, stopped_by
    message = await create(client, stop_sequences=["END"])
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == (stopped_by if reason == "stop_sequence" else None)
    assert engine.requests[0].stop == ("END",)


async def test_thoughts_text_and_calls_are_blocks_in_their_order(client, thinker):
    message = await create(client, tools=[TOOL], max_tokens=len(thinker.texts))
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use"]
    assert message["content"][0]["thinking"] == "hm"
    assert message["content"][2]["name"] == "look"
    assert message["content"][2]["input"] == {"at": "x"}
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("kind", ["adaptive", "enabled"])
async def test_thoughts_that_are_to_be_omitted_are_in_no_block(client, thinker, kind):
    thinking = {"type": kind, "display": "omitted"}
    message = await create(client, tools=[TOOL], max_tokens=len(thinker.texts), thinking=thinking)
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]


async def test_a_stream_has_the_events_of_each_block_and_adds_up_to_the_whole_message(client, thinker):
    whole = await create(client, tools=[TOOL], max_tokens=len(thinker.texts))
    body = {**ASK, "tools": [TOOL], "max_tokens": len(thinker.texts), "stream": True}
    found = events((await client.post(PATH, json=body)).text)
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict] = []
    texts: list[str] = []
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            (text,) = (value for name, value in event["delta"].items() if name != "type")
            texts[event["index"]] += text
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
    assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]]
    assert texts[:2] == [whole["content"][0]["thinking"], whole["content"][1]["text"]]
    assert orjson.loads(texts[2]) == whole["content"][2]["input"]
    assert found[-2]["usage"] == whole["usage"]
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"]


@pytest.mark.parametrize(
    ("arguments", "streamed"),
    [("5", ""), ("[1]", ""), ('"Yes {"', ""), ('{"at": 1}', '{"at": 1}')],
)
async def test_arguments_that_are_no_object_are_none(client, thinker, arguments, streamed):
    thinker.texts = (*f'<tool_call>{{"name": "look", "arguments": {arguments}', "}</tool_call>")
    body = {"tools": [TOOL], "max_tokens": len(thinker.texts)}
    (block,) = (await create(client, **body))["content"]
    assert block["input"] == (orjson.loads(streamed) if streamed else {})
    found = events((await client.post(PATH, json={**ASK, **body, "stream": True})).text)
    pieces = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(pieces) == streamed
    assert found[-1]["type"] == "message_stop"


async def test_arguments_that_are_nested_too_deep_end_there_and_can_be_sent_back(client, thinker):
    thinker.texts = (
        '<tool_call>{"name": "look", "arguments": ',
        '{"a": ' * 300 + "1" + "}" * 301 + "</tool_call>",
    )
    body = {"tools": [TOOL], "max_tokens": 2}
    (call,) = (await create(client, **body))["content"]
    found = events((await client.post(PATH, json={**ASK, **body, "stream": True})).text)
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    streamed = "".join(delta["partial_json"] for delta in deltas)
    assert orjson.loads(streamed) == call["input"]
    assert streamed.count("{") == 64
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    await create(client, messages=turns, **body)


async def test_results_of_tools_reach_the_template_as_messages_of_their_own(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="<tool_call>", max_model_len=4096)
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "x"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen", "is_error": True},
        {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
    ]
    turns = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [thought, use]},
        {"role": "user", "content": results},
    ]
    await create(client, messages=turns, tools=[TOOL])
    messages, _ = engine.chats[0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["reasoning_content"] == "hm"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"at":"x"}'
    assert (messages[2]["name"], messages[2]["content"]) == ("look", "Error: seen")
    assert messages[3]["content"] == "and?"


async def test_what_a_search_for_tools_found_and_nulls_of_metadata_are_read(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="<tool_call>", max_model_len=4096)
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "look_up"}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": found}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    await create(
        client, messages=[*ASK["messages"], *turns], tools=[TOOL], metadata={"user_id": None, "of": "a"}
    )
    assert engine.chats[0][0][-1]["content"] == "look_up"


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("bash_20250124", "command"),
        ("text_editor_20250728", "old_str"),
        ("memory_20250818", "old_path"),
        ("computer_20251124", "coordinate"),
    ],
)
async def test_a_tool_of_anthropics_that_the_caller_runs_is_a_function(client, engine, kind, field):
    engine.model_info = dataclasses.replace(INFO, chat_template="<tool_call>", max_model_len=4096)
    tool = {"type": kind, "name": "theirs", "display_width_px": 9, "max_characters": 9}
    await create(client, tools=[tool], max_tokens=1)
    (shown,) = engine.chats[0][1].tools
    assert shown["function"]["name"] == "theirs"
    assert field in shown["function"]["parameters"]["properties"]


async def test_work_of_others_is_left_out_and_named(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="<tool_call>", max_model_len=4096)
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "error"}},
        {"type": "text", "text": "found"},
        {"type": "tool_use", "id": "t", "name": "f", "input": {}, "cache_control": {"type": "ephemeral"}},
    ]
    body = {
        "max_tokens": 1,
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": blocks}],
    }
    reply = await client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    assert [message["content"] for message in engine.chats[0][0]] == ["go", "found"]
    assert engine.chats[0][1].tools == ()
    assert reply.headers["x-tokenyard-ignored"].split(", ") == [
        "tools.web_search_20250305",
        *(f"messages.{block['type']}" for block in blocks[:3]),
        "messages.tool_use.cache_control",
    ]


async def test_documents_and_search_results_are_read_as_text_in_results_of_tools_too(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="<tool_call>", max_model_len=4096)
    plain = {"type": "document", "title": "T", "source": {"type": "text", "data": "one"}}
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "two"}]}}
    inner = [{"type": "text", "text": "three"}]
    found = {"type": "search_result", "source": "http://x", "title": "S", "content": inner}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    turns = [
        {"role": "user", "content": [plain, parts, found]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [found, plain]}]},
    ]
    await create(client, messages=turns, max_tokens=1)
    user, _, result = engine.chats[0][0]
    assert [part["text"] for part in user["content"]] == ["T\none", "two", "S\nhttp://x\nthree"]
    assert result["content"] == "S\nhttp://x\nthree\nT\none"


async def test_a_last_turn_of_the_assistant_is_gone_on_with(client, engine):
    await create(client, messages=[*ASK["messages"], {"role": "assistant", "content": "Well"}])
    assert engine.chats[0][1].final == "continue"


async def test_more_tokens_than_the_context_window_leaves_are_cut_to_it(client, engine):
    await create(client, max_tokens=32_000)
    (request,) = engine.requests
    assert request.params.max_tokens == INFO.max_model_len - len(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("choice", "is_held"),
    [({"type": "any"}, True), ({"type": "tool", "name": "look"}, True), ({"type": "none"}, False)],
)
async def test_a_choice_of_tools_holds_the_reply_to_it(client, engine, choice, is_held):
    engine.model_info = dataclasses.replace(engine.model_info, chat_template="<tool_call>")
    await create(client, tools=[TOOL], tool_choice=choice, max_tokens=2)
    assert (engine.requests[0].params.grammar is not None) == is_held


SOURCE = {"type": "base64", "media_type": "image/png", "data": "aa"}
PICTURE = {"type": "image", "source": SOURCE}
TEXT = {"type": "text", "text": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
USE = {"type": "tool_use", "id": "1", "name": "look", "input": {}}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source: pictures are of type base64 or url, not 'file'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
            "messages[0].content[0]: the model 'fake' reads no pictures",
        ),
        (
            {"system": "x", "messages": [ASK["messages"][0], {"role": "user", "content": [PICTURE]}]},
            "messages[1].content[0]: the model 'fake' reads no pictures",
        ),
        (
            {"system": "x", "messages": [{"role": "user", "content": [RESULT, {**RESULT}, PICTURE]}]},
            "messages[0].content[2]: the model 'fake' reads no pictures",
        ),
        (
            {"messages": [{"role": "user", "content": [TEXT, {**RESULT, "content": [TEXT, PICTURE]}]}]},
            "messages[0].content[1].content[1]: the model 'fake' reads no pictures",
        ),
        (
            {"messages": [ASK["messages"][0], {"role": "assistant", "content": [RESULT]}]},
            "messages[1].content[0]: content blocks of type 'tool_result'",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "is_error": True, "content": [PICTURE]}]}]},
            "messages[0].content[0].content[0]: the model 'fake' reads no pictures",
        ),
        (
            {"messages": [{"role": "user", "content": [TEXT, {**RESULT, "tool_use_id": ""}]}]},
            "messages[0].content[1].tool_use_id: must have",
        ),
        *(
            (
                {"messages": [{"role": "assistant", "content": [TEXT, USE, {**USE, name: ""}]}]},
                f"messages[0].content[2].{name}: must have",
            )
            for name in ("id", "name")
        ),
        (
            {"messages": [ASK["messages"][0], {"role": "assistant", "content": [USE] * 129}]},
            "messages[1].content of type tool_use: must have at most 128",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tools[7]"}]}]}, "'tools[7]'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "teapot_20250305", "name": "tea"}]}, "'teapot_20250305'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source: documents must be text, not of type 'base64'",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}, {**TOOL, "name": "no blanks"}]},
            "tools[1].name",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}, {"type": "tea", "name": "t"}]}, "tools[1]"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "w"}],
                "tool_choice": {"type": "tool", "name": "w"},
            },
            "tool_choice.name: there is no tool named 'w'",
        ),
        *(
            (
                {**more, "tool_choice": {"type": kind, "name": "look"}},
                f"tool_choice.name: a choice of type '{kind}'",
            )
            for kind in ("auto", "any", "none")
            for more in ({}, {"tools": [TOOL]})
        ),
        ({"tools": [{**TOOL, "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"temperature": 9}, "temperature: must be less than or equal to 2"),
    ],
)
async def test_what_is_wrong_is_said_in_anthropics_shape_and_words(client, engine, body, told):
    error = await refused(client, **body)
    assert error["type"] == "invalid_request_error"
    assert told in error["message"]
    assert not engine.requests


async def test_a_place_that_the_caller_has_not_written_is_named_as_the_template_names_it(client, engine):
    async def encode_chat(_):
        raise RequestRejected("the chat template leaves messages[7] out", param="messages")

    engine.encode_chat = encode_chat
    assert (await refused(client))["message"] == "the chat template leaves messages[7] out"


async def test_a_model_that_is_not_there_is_not_found(client):
    for path in (PATH, f"{PATH}/count_tokens"):
        assert (await refused(client, 404, path, model="other"))["type"] == "not_found_error"


async def test_the_tokens_of_a_prompt_are_counted_as_the_message_would_count_them(client, engine):
    engine.model_info = dataclasses.replace(engine.model_info, chat_template="<tool_call>")
    body = {**ASK, "tools": [TOOL], "system": "be brief"}
    counted = (await client.post(f"{PATH}/count_tokens", json=body)).json()
    await create(client, **{**body, "tool_choice": {"type": "any"}})
    assert counted == {"input_tokens": len(engine.requests[0].prompt_token_ids)}
    assert engine.chats[0] == engine.chats[1]


async def test_a_stream_that_breaks_ends_with_an_error_event(client, engine):
    engine.error_after, engine.error = 1, RequestFailed("no")
    last = events((await client.post(PATH, json={**ASK, "stream": True})).text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


async def test_a_key_may_come_in_anthropics_header_and_a_wrong_one_is_told_in_its_shape():
    async with connect(build_app(FakeEngine(), Settings(api_keys=("secret",)))) as client:
        asked = await client.post(PATH, json=ASK, headers={"x-api-key": "secret"})
        wrong = await client.post(PATH, json=ASK, headers={"x-api-key": "else"})
        both = await client.post(
            PATH, json=ASK, headers={"x-api-key": "secret", "authorization": "Bearer else"}
        )
    assert asked.status_code == 200
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    assert both.status_code == 401


async def test_a_client_that_looks_whether_a_server_is_there_finds_one(client):
    assert (await client.head("/")).status_code == 200
