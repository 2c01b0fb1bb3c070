"""Tools that agents bring to /v1/responses: namespaces, free text, a shell, and the work of others."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.types import FinishReason
from server.api.responses.tools import InputText
from tests.server.api.responses.test_responses import PATH, create, events, refused
from tests.server.fake_engine import FakeEngine

SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
TEAM = {"type": "namespace", "name": "team", "description": "Helpers.", "tools": [SPAWN]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
SHELL = {"type": "local_shell"}
SEARCH = {"type": "web_search", "external_web_access": False}


def says(name: str, arguments: dict) -> tuple[str, ...]:
    """The text of a call, in pieces of three characters."""
    text = "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"
    return tuple(text[at : at + 3] for at in range(0, len(text), 3))


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(end_as=FinishReason.STOP)
    engine.model_info = replace(engine.model_info, chat_template="<tool_call>", max_model_len=8192)
    return engine


async def test_functions_of_a_namespace_are_shown_under_one_name_and_called_under_both(client, engine):
    engine.texts = says("team__spawn", {})
    response = await create(client, tools=[TEAM, SEARCH], max_output_tokens=len(engine.texts))
    (shown,) = engine.chats[-1][1].tools
    assert shown["function"]["name"] == "team__spawn"
    assert shown["function"]["description"] == "Helpers."
    (call,) = response["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "team", "spawn")
    await create(client, input=[call], tools=[TEAM], max_output_tokens=1)
    assert engine.chats[-1][0][0]["tool_calls"][0]["function"]["name"] == "team__spawn"


@pytest.mark.parametrize("taken", [False, True], ids=["long", "taken"])
async def test_a_name_that_is_too_long_or_taken_ends_in_a_hash(client, engine, taken):
    space = {**TEAM, "name": "t" if taken else "t" * 60}
    tools = [{**SPAWN, "name": "t__spawn"}, space]
    await create(client, tools=tools, max_output_tokens=1)
    shown = engine.chats[-1][1].tools[1]["function"]["name"]
    assert len(shown) <= 64
    engine.texts = says(shown, {})
    (call,) = (await create(client, tools=tools, max_output_tokens=len(engine.texts)))["output"]
    assert (call["namespace"], call["name"]) == (space["name"], "spawn")


async def test_a_custom_tool_is_a_function_of_one_text_and_its_calls_are_items_of_their_own(client, engine):
    text = 'a "b"\n\té 😀 \\ ü'
    engine.texts = says("apply_patch", {"input": text})
    body = {"input": "hi", "tools": [PATCH], "max_output_tokens": len(engine.texts), "stream": True}
    stream = events(await client.post(PATH, json=body))
    (shown,) = engine.chats[-1][1].tools
    assert shown["function"]["parameters"]["required"] == ["input"]
    assert 'start: "x"' in shown["function"]["description"]
    deltas = [event["delta"] for event in stream if event["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in stream if event["type"] == "response.custom_tool_call_input.done"]
    (item,) = stream[-1]["response"]["output"]
    assert len(deltas) > 3
    assert "".join(deltas) == done["input"] == item["input"] == text
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    await create(client, input=[item, output], max_output_tokens=1)
    call, result = engine.chats[-1][0]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"input": text}
    assert (result["role"], result["content"]) == ("tool", "ok")


@pytest.mark.parametrize(("num", "shown"), [(3, ""), (4, "pla"), (99, "plain")])
async def test_a_custom_call_that_is_cut_off_shows_as_much_of_its_text_as_there_is(
    client, engine, num, shown
):
    parts = [
        '<tool_call>{"name": "apply_patch", "arguments": {',
        '"inp',
        'ut": "',
        "pla",
        'in"}}</tool_call>',
    ]
    engine.texts, engine.end_as = parts[:num], FinishReason.LENGTH
    (item,) = (await create(client, tools=[PATCH], max_output_tokens=len(engine.texts)))["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", shown)


async def test_a_call_of_the_shell_is_an_item_with_an_action(client, engine):
    engine.texts = says("local_shell", {"command": ["ls"]})
    (item,) = (await create(client, tools=[SHELL], max_output_tokens=len(engine.texts)))["output"]
    assert item["type"] == "local_shell_call"
    assert item["action"] == {"type": "exec", "env": {}, "command": ["ls"]}
    output = {"type": "local_shell_call_output", "id": item["call_id"], "output": "a b"}
    await create(client, input=[item, output], tools=[SHELL], max_output_tokens=1)
    call, result = engine.chats[-1][0]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"command": ["ls"]}
    assert result["tool_call_id"] == item["call_id"]


async def test_a_call_of_the_shell_that_is_nested_too_deep_ends_there(client, engine):
    deep = json.loads("[" * 300 + "]" * 300)
    engine.texts = says("local_shell", {"command": deep})
    asked = {"tools": [SHELL], "max_output_tokens": len(engine.texts)}
    (item,) = (await create(client, **asked))["output"]
    reply = await client.post(PATH, json={"input": "hi", **asked, "stream": True})
    last = events(reply)[-1]
    assert last["type"] == "response.completed"
    for shown in (item, last["response"]["output"][0]):
        assert json.dumps(shown["action"]["command"]).count("[") == 63


async def test_calls_of_a_stored_response_go_on_and_are_listed(client, engine):
    engine.texts = says("apply_patch", {"input": "x"})
    first = await create(client, tools=[PATCH, TEAM], max_output_tokens=len(engine.texts))
    output = {"type": "custom_tool_call_output", "call_id": first["output"][0]["call_id"], "output": "ok"}
    added = {"type": "additional_tools", "tools": [SPAWN]}
    second = await create(
        client, input=[added, output], previous_response_id=first["id"], max_output_tokens=1
    )
    assert [message["role"] for message in engine.chats[-1][0]] == ["user", "assistant", "tool"]
    assert engine.chats[-1][1].tools[0]["function"]["name"] == "spawn"
    page = (await client.get(f"{PATH}/{second['id']}/input_items")).json()
    assert [item["type"] for item in page["data"]] == ["custom_tool_call_output", "additional_tools"]


async def test_a_fault_of_an_unpacked_tool_is_told_at_its_place(client):
    bad = {**SPAWN, "name": "no blanks"}
    error = await refused(client, tools=[SEARCH, {**TEAM, "tools": [SPAWN, bad]}])
    assert error["param"] == "tools[1].tools[1].name"
    assert (await refused(client, tools=[SPAWN, SEARCH, SPAWN]))["param"] == "tools[2].name"


async def test_encrypted_thoughts_are_left_out_and_their_summary_stays(client, engine):
    item = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": "x",
    }
    reply = await client.post(PATH, json={"input": [item, {"role": "user", "content": "on"}]})
    assert engine.chats[-1][0][0]["reasoning_content"] == "hm"
    assert reply.headers["x-tokenyard-ignored"] == "input.encrypted_content"


@pytest.mark.parametrize(
    "text", ["", "plain", '"\\/\b\f\n\r\t', "é😀\u2028", "\\u0041 \\n", '{"input": "x"}', "a" * 50]
)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_free_text_is_unescaped_as_it_comes_however_it_is_cut(text, is_ascii):
    whole = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = [[*range(len(whole) + 1)], *([0, at, len(whole)] for at in range(len(whole)))]
    for places in cuts:
        reader = InputText()
        assert "".join(reader.feed(whole[a:b]) for a, b in pairwise(places)) == text
