"""A checkpoint's response template in every protocol, through the whole application."""

import dataclasses
import json
from pathlib import Path

import pytest

from engine.types import FinishReason
from server.app import build_app
from server.command.startup.template_notice import note_template
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import INFO
from tests.server.reply.reading.templates import COHERE, ERNIE, QWEN_CODER

WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]
ASK = [{"role": "user", "content": "hi<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"}]
TEXTS = (
    *("<|START_THINKING|>", "It is ", "far.", "<|END_THINKING|>", "<|START_RESPONSE|>", "I ", "look."),
    *("<|END_RESPONSE|>", "<|START_ACTION|>", '[{"tool_name": "get_', 'weather", "parameters": {"city": '),
    *('"Bonn", "days": ', "3}}]", "<|END_ACTION|>"),
)
ARGUMENTS = {"city": "Bonn", "days": 3}


@pytest.fixture
def engine(engine):
    """A model of no known dialect, with a template."""
    engine.model_info = dataclasses.replace(
        INFO,
        max_model_len=4096,
        chat_template="{{ tools }}",
        response_template=json.dumps(COHERE),
        added_tokens={"<|START_ACTION|>": 7, "<|END_ACTION|>": 8, "<|PAD|>": 9, "<|END_THINKING|>": 10},
    )
    engine.texts, engine.end_as = TEXTS, FinishReason.STOP
    return engine


async def ask(client, **fields) -> dict:
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": len(TEXTS), **fields}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_chat_has_reasoning_content_and_calls(client, engine):
    (choice,) = (await ask(client))["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("It is far.", "I look.")
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", ARGUMENTS)
    assert choice["finish_reason"] == "tool_calls"
    request = engine.requests[0]
    assert request.params.grammar is None, "the model writes as it was trained to"
    assert engine.chats[0][1].tools, "its chat template shows the tools"
    assert request.shown_special_ids == {7, 8, 10}


async def test_a_stream_adds_up_to_the_whole_reply(client, engine):
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": len(TEXTS), "stream": True}
    reply = await client.post("/v1/chat/completions", json=body)
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == [
        "It is",
        " far.",
    ]
    assert [delta["content"] for delta in deltas if delta.get("content")] == ["I", " look."]
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert [piece["name"] for piece in pieces if piece.get("name")] == ["get_weather"]
    assert json.loads("".join(piece["arguments"] for piece in pieces)) == ARGUMENTS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_reasoning_that_the_prompt_begins_is_none_of_the_reply(client, engine):
    engine.texts = ("far.", *TEXTS[3:])
    begun = [{"role": "user", "content": f"{ASK[0]['content']}<|START_THINKING|>It is"}]
    (choice,) = (await ask(client, messages=begun, max_tokens=len(engine.texts)))["choices"]
    assert choice["message"]["reasoning_content"] == "far."
    assert choice["message"]["content"] == "I look."


async def test_responses_have_an_item_for_each_field(client, engine):
    body = {"input": ASK, "tools": [{"type": "function", **WEATHER}], "max_output_tokens": len(TEXTS)}
    reply = await client.post("/v1/responses", json=body)
    reasoning, message, call = reply.json()["output"]
    assert reasoning["content"][0]["text"] == "It is far."
    assert message["content"][0]["text"] == "I look."
    assert json.loads(call["arguments"]) == ARGUMENTS


async def test_anthropics_messages_have_a_block_for_each_field(client, engine):
    tools = [{"name": "get_weather", "input_schema": WEATHER["parameters"]}]
    body = {"messages": ASK, "tools": tools, "max_tokens": len(TEXTS)}
    thinking, text, call = (await client.post("/v1/messages", json=body)).json()["content"]
    assert (thinking["thinking"], text["text"]) == ("It is far.", "I look.")
    assert (call["name"], call["input"]) == ("get_weather", ARGUMENTS)


async def test_ollamas_chats_have_a_key_for_each_field(client, engine):
    body = {"model": "fake", "messages": ASK, "tools": TOOLS, "stream": False}
    message = (await client.post("/api/chat", json={**body, "options": {"num_predict": len(TEXTS)}})).json()
    assert message["message"]["thinking"] == "It is far."
    assert message["message"]["content"] == "I look."
    assert message["message"]["tool_calls"] == [{"function": {"name": "get_weather", "arguments": ARGUMENTS}}]
    shown = await client.post("/api/show", json={"model": "fake"})
    assert shown.json()["capabilities"] == ["completion", "tools", "thinking"]


async def test_calls_are_text_where_no_tool_is_offered(client, engine):
    (choice,) = (await ask(client, tool_choice="none"))["choices"]
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith('I look.\n[{"tool_name"')


async def test_a_forced_call_is_held_by_a_grammar_behind_the_mark_of_the_answer(client, engine):
    engine.texts = ('{"city": "Bonn"}',)
    named = {"type": "function", "function": {"name": "get_weather"}}
    (choice,) = (await ask(client, tool_choice=named, max_tokens=1))["choices"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Bonn"}
    request = engine.requests[0]
    assert request.params.grammar is not None
    assert b"<|START_RESPONSE|>" in bytes(request.prompt_token_ids)


async def test_a_call_that_is_cut_off_stays_open(client, engine):
    engine.texts, engine.end_as = TEXTS[:-2], FinishReason.LENGTH
    (choice,) = (await ask(client, max_tokens=len(engine.texts)))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Bonn"'
    assert choice["finish_reason"] == "length"


async def test_a_call_that_ends_with_the_reply_of_a_model_is_one(client, engine):
    engine.texts = TEXTS[:-1]
    (choice,) = (await ask(client, max_tokens=len(engine.texts)))["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


async def test_a_grammar_begins_behind_reasoning_that_an_expression_opens(client, engine):
    engine.model_info = dataclasses.replace(
        engine.model_info,
        chat_template="{{ tools }}<think></think>",
        response_template=json.dumps(ERNIE),
        added_tokens={"<think>": 5, "</think>": 10},
    )
    engine.texts = ("Hm.", "</think>", "{}")
    fields = {"tools": None, "response_format": {"type": "json_object"}, "max_tokens": 3}
    opened = [{"role": "user", "content": "Assistant:<think>"}]
    (choice,) = (await ask(client, messages=opened, **fields))["choices"]
    assert engine.requests[0].params.grammar.begins_after == 10
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "{}")


async def test_a_call_that_a_grammar_writes_is_read_as_the_grammar_writes_it(client, engine):
    call = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
    engine.texts = (f"<tool_call>{call}</tool_call>",)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    (choice,) = (await ask(client, response_format=schema, max_tokens=1))["choices"]
    assert engine.requests[0].params.grammar is not None
    (read,) = choice["message"]["tool_calls"]
    assert json.loads(read["function"]["arguments"]) == ARGUMENTS
    assert not choice["message"]["content"]


async def test_an_option_that_names_a_parser_sets_the_template_aside(engine):
    async with connect(build_app(engine, Settings(reasoning_parser="none"))) as client:
        (choice,) = (await ask(client))["choices"]
    assert choice["message"]["content"].startswith("<|START_THINKING|>It is far.")


@pytest.mark.parametrize("parser", ["auto", "hermes"])
def test_a_template_that_is_not_read_is_set_aside_with_a_warning(tmp_path: Path, caplog, parser):
    fields = {**QWEN_CODER["fields"], "content": {"close_pattern": r"a(?!b)"}}
    config = {"response_template": {**QWEN_CODER, "fields": fields, "defaults": {"is": parser}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    note_template(tmp_path, Settings(tool_call_parser=parser))
    assert ("close_pattern: what stands at character 1" in caplog.text) == (parser == "auto")
