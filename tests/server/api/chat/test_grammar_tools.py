"""Tools for models that have no way of writing calls: what they are shown, and what holds their replies."""

import dataclasses
import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.types import FinishReason, GrammarKind
from server.app import build_app
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import INFO

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather ::= of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Bonn", "Köln"]}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
HI = {"role": "user", "content": "hi"}
BONN = '{"name": "get_weather", "arguments": {"city": "Bonn"}}'


@pytest.fixture
def engine(engine):
    engine.model_info = dataclasses.replace(
        INFO, chat_template="{{ messages }}", added_tokens={}, max_model_len=4096
    )
    engine.end_as = FinishReason.STOP
    engine.texts = ("Well. <tool_", "call>", BONN, "</tool_call>")
    return engine


async def ask(client, **fields) -> dict:
    body = {"messages": [HI], "tools": [WEATHER, TIME], "max_tokens": 4, **fields}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def test_the_tools_stand_in_the_system_message_or_before_the_users(client, engine):
    choice = await ask(client)
    assert choice["message"]["content"] == "Well."
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "get_weather",
        {"city": "Bonn"},
    )
    ((shown,), options) = engine.chats[0]
    assert options.tools == ()
    assert shown["role"] == "user"
    assert shown["content"].endswith("\n\nhi")
    for part in ('"name": "get_weather"', '"name": "get_time"', "<tool_call>"):
        assert part in shown["content"]
    await ask(client, messages=[{"role": "system", "content": "Be brief."}, HI])
    system, user = engine.chats[1][0]
    assert system["content"].startswith("Be brief.\n\nYou can call")
    assert user == HI


async def test_earlier_calls_and_results_become_turns_that_every_template_knows(client, engine):
    call = {"id": "a", "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "b"}]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "sun"},
        {"role": "user", "content": "So?"},
    ]
    for choice in ("auto", "none"):
        await ask(client, messages=messages, tool_choice=choice)
        first, second, third = engine.chats[-1][0]
        assert ("get_weather" in first["content"]) == (choice == "auto")
        assert second == {"role": "assistant", "content": f"<tool_call>{BONN}</tool_call>" * 2}
        assert third["role"] == "user"
        assert third["content"] == (
            "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>\nSo?"
        )


@pytest.mark.parametrize(
    ("text", "is_possible", "is_whole"),
    [
        ("", True, True),
        ("Plain <b>text</b> with [1] {2}.", True, True),
        ("a <tool_cal", True, True),
        (f"Wait. <tool_call>{BONN}</tool_call>", True, True),
        (f'<tool_call>{BONN}</tool_call><tool_call>{{"name": "get_time", "arguments": {{}}}}', True, False),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "Rom', False, False),
        ('<tool_call>{"name": "unheard_of"', False, False),
        ("<tool_call>oops", False, False),
        (f"<tool_call>{BONN}</tool_call> and on", False, False),
    ],
)
async def test_the_grammar_takes_text_or_calls_of_these_tools(client, engine, text, is_possible, is_whole):
    await ask(client)
    grammar = engine.requests[0].params.grammar
    assert grammar.kind is GrammarKind.LARK
    assert "::=" not in grammar.text
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar.text)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    assert (matcher.validate_tokens(tokens) == len(tokens)) == is_possible
    if is_possible:
        matcher.consume_tokens(tokens)
        assert matcher.is_accepting() == is_whole


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "odd"}}])
async def test_the_tool_is_named_whose_schema_cannot_be_enforced(client, choice):
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"title": "refuse"}}}
    body = {"messages": [HI], "tools": [WEATHER, odd, TIME], "tool_choice": choice}
    reply = await client.post(CHAT, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools[1].function.parameters")


async def test_without_parallel_calls_the_grammar_ends_behind_the_first(client, engine):
    await ask(client, parallel_tool_calls=False)
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, engine.requests[0].params.grammar.text)
    tokens = tokenizer.tokenize_str(f"<tool_call>{BONN}</tool_call><tool_call>")
    assert matcher.validate_tokens(tokens) == len(f"<tool_call>{BONN}</tool_call>")


async def test_a_template_may_open_the_call_itself(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="<tool_call>", added_tokens={})
    engine.texts = (BONN, "</tool_call>")
    for choice in ("auto", "required"):
        reply = await ask(
            client,
            messages=[{"role": "user", "content": "hi<tool_call>\n"}],
            tool_choice=choice,
            max_tokens=2,
        )
        assert (reply["finish_reason"], reply["message"]["content"]) == ("tool_calls", None)
        assert reply["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Bonn"}'
        matcher = LLMatcher(LLTokenizer("byte"), engine.requests[-1].params.grammar.text)
        assert not matcher.get_error()
        assert matcher.validate_tokens(LLTokenizer("byte").tokenize_str("Well")) == 0


async def test_an_own_parser_none_refuses_the_choice_by_name(engine):
    async with connect(build_app(engine, Settings(tool_call_parser="none"))) as client:
        response = await client.post(CHAT, json={"messages": [HI], "tools": [TIME]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


async def test_a_template_that_reads_tools_in_the_system_message_finds_them_there(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="<|tool|>{{ tools }}<|/tool|>")
    await ask(client)
    system, _ = engine.chats[0][0]
    assert json.loads(system["tools"])[1] == {"name": "get_time"}


ANSWER = {
    "type": "object",
    "properties": {"say": {"type": "string", "description": "a ::= b"}},
    "required": ["say"],
    "additionalProperties": False,
}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}


@pytest.mark.parametrize(
    ("text", "is_possible", "is_whole"),
    [
        ('{"say": "hi"}', True, True),
        (f"<tool_call>{BONN}</tool_call>", True, True),
        ("hi", False, False),
        ('{"say": 5', False, False),
        ('{"say": "hi"}<tool_call>', False, False),
        ('<tool_call>{"name": "unheard_of"', False, False),
    ],
)
@pytest.mark.parametrize("template", ["{{ messages }}", "{{ messages }} {{ tools }} <tool_call>"])
async def test_with_a_response_format_the_reply_matches_it_or_is_calls(
    client, engine, template, text, is_possible, is_whole
):
    engine.model_info = dataclasses.replace(engine.model_info, chat_template=template)
    await ask(client, response_format=AS_JSON)
    grammar = engine.requests[0].params.grammar
    assert "::=" not in grammar.text
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar.text)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    assert (matcher.validate_tokens(tokens) == len(tokens)) == is_possible
    if is_possible:
        matcher.consume_tokens(tokens)
        assert matcher.is_accepting() == is_whole


async def test_with_a_response_format_the_calls_are_read(client, engine):
    engine.texts = (f"<tool_call>{BONN}</tool_call>",)
    choice = await ask(client, response_format=AS_JSON, max_tokens=1)
    assert choice["finish_reason"] == "tool_calls"
    engine.texts = ('{"say": "hi"}',)
    choice = await ask(client, response_format=AS_JSON, max_tokens=1)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", '{"say": "hi"}')


async def test_a_required_call_is_not_text_and_other_structures_exclude_tools(client, engine):
    engine.texts = (f"[{BONN.replace('arguments', 'parameters')}]",)
    await ask(client, response_format=AS_JSON, tool_choice="required", max_tokens=1)
    assert '"say"' not in engine.requests[-1].params.grammar.text
    body = {"messages": [HI], "tools": [TIME], "structured_outputs": {"regex": "a"}}
    reply = await client.post(CHAT, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "structured_outputs.regex")
    engine.model_info = dataclasses.replace(engine.model_info, chat_template="<|python_tag|> tools")
    reply = await client.post(CHAT, json={"messages": [HI], "tools": [TIME], "response_format": AS_JSON})
    assert "exclude each other here" in reply.json()["error"]["message"]
