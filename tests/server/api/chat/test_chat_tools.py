"""Tools in POST /v1/chat/completions, through the whole application."""

import dataclasses
import json
import re

import pytest

from engine.types import FinishReason, GrammarKind
from server.api.chat.models import ChatCompletion, ChatCompletionChunk
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.tool_use import tool_use_of
from server.app import build_app
from server.reply.reading.dialects import find_dialect
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import INFO

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "$defs": {"city": {"type": "string"}},
        },
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, TIME], "max_tokens": 120}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
HERMES = (
    *(
        "Let me ",
        "look.\n",
        "<tool_call>",
        '\n{"name": "get_',
        'weather", "argu',
        'ments": {"city":',
        ' "Bonn"',
    ),
    *("}}\n", "</tool_call>", '\n<tool_call>{"name": "get_time"}', "</tool_call>"),
)
CALLS = [("get_weather", '{"city": "Bonn"}'), ("get_time", "{}")]


@pytest.fixture
def engine(engine):
    engine.model_info = dataclasses.replace(
        INFO, chat_template="<tool_call>", added_tokens={"<tool_call>": 7, "<|im_end|>": 8}
    )
    say(engine, *HERMES)
    return engine


def say(engine, *texts: str) -> None:
    engine.texts, engine.end_as = texts, FinishReason.STOP


async def ask(client, engine, **fields) -> dict:
    response = await client.post(CHAT, json={**BODY, "max_tokens": len(engine.texts), **fields})
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    return response.json()["choices"][0]


def schema_of(engine) -> dict:
    """Schema that the grammar of the last request has for the tools."""
    grammar = engine.requests[-1].params.grammar
    assert grammar.kind is GrammarKind.LARK
    schema = json.loads(grammar.text.removeprefix("start: %json "))
    assert schema.pop("x-guidance")["whitespace_flexible"] is False
    return schema


async def deltas(client, engine, **fields) -> list[dict]:
    """The choices of all chunks."""
    body = {**BODY, "max_tokens": len(engine.texts), "stream": True, **fields}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return [choice for chunk in chunks for choice in chunk["choices"]]


def called(message: dict) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]


async def test_calls_are_told_apart_from_content(client, engine):
    choice = await ask(client, engine)
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], called(message)) == ("Let me look.", CALLS)
    assert all(call["type"] == "function" for call in message["tool_calls"])
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", one) for one in ids)


async def test_calls_without_content_leave_it_null(client, engine):
    say(engine, *HERMES[2:])
    message = (await ask(client, engine))["message"]
    assert (message["content"], called(message)) == (None, CALLS)


async def test_a_stream_tells_the_call_first_and_then_its_arguments_in_pieces(client, engine):
    choices = await deltas(client, engine, logprobs=True)
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Let me look."
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"].get("name")) for call in calls if "id" in call] == [
        (0, "get_weather"),
        (1, "get_time"),
    ]
    assert [call["function"]["arguments"] for call in calls if call["index"] == 0] == [
        "",
        "{",
        '"city": "Bonn"',
        "}",
    ]
    assert choices[-1]["finish_reason"] == "tool_calls"
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert [token["token"] for token in tokens] == list(HERMES)


async def test_the_template_sees_the_tools_and_the_marks_stay_in_the_text(client, engine):
    await ask(client, engine)
    weather = {key: value for key, value in WEATHER["function"].items() if key != "strict"}
    assert engine.chats[0][1].tools == ({"type": "function", "function": weather}, TIME)
    assert engine.requests[0].shown_special_ids == {7}
    assert engine.requests[0].params.grammar is None


async def test_without_tools_to_call_none_are_shown_and_text_is_text(client, engine):
    for fields in ({"tools": []}, {"tools": None}, {"tool_choice": "none"}):
        choice = await ask(client, engine, **fields)
        assert choice["message"]["content"] == "".join(HERMES)
        assert choice["finish_reason"] == "stop"
        assert engine.chats[-1][1].tools == ()
        assert engine.requests[-1].shown_special_ids == frozenset()


async def test_a_required_call_is_a_list_that_matches_a_grammar(client, engine):
    say(
        engine,
        '[{"name": "get_weather", ',
        '"parameters": {"city": "Bonn"}}, {"name": "get_time", ',
        '"parameters": {}}]',
    )
    choice = await ask(client, engine, tool_choice="required")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert called(choice["message"]) == CALLS
    schema = schema_of(engine)
    assert schema["minItems"] == 1
    assert "maxItems" not in schema
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == [
        "get_weather",
        "get_time",
    ]
    assert schema["$defs"]["tool0"]["properties"]["city"] == {"$ref": "#/$defs/tool0/$defs/city"}


async def test_a_named_call_is_its_arguments_alone_and_ends_as_openai_ends_it(client, engine):
    say(engine, ' {"city": ', '"Bonn"}')
    choice = await ask(client, engine, tool_choice=NAMED)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", None)
    assert called(choice["message"]) == CALLS[:1]
    assert schema_of(engine) == WEATHER["function"]["parameters"]
    assert len(engine.chats[0][1].tools) == 2
    choices = await deltas(client, engine, tool_choice=NAMED)
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[1]["delta"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ""}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_leave_the_others_out(client, engine, mode):
    if mode == "required":
        say(engine, '[{"name": "get_time", "parameters": {}}]')
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [TIME]}}
    reply = await ask(client, engine, tool_choice=choice)
    assert reply["finish_reason"] == "tool_calls"
    assert engine.chats[0][1].tools == (TIME,)
    assert (engine.requests[0].params.grammar is not None) == (mode == "required")


async def test_one_call_at_most_where_parallel_calls_are_off(client, engine):
    assert called((await ask(client, engine, parallel_tool_calls=False))["message"]) == CALLS[:1]
    choices = await deltas(client, engine, parallel_tool_calls=False)
    assert {call["index"] for choice in choices for call in choice["delta"].get("tool_calls", [])} == {0}
    say(engine, '[{"name": "get_time", "parameters": {}}]')
    await ask(client, engine, parallel_tool_calls=False, tool_choice="required")
    assert schema_of(engine)["maxItems"] == 1


async def test_a_call_that_is_cut_off_ends_for_its_length(client, engine):
    engine.texts, engine.end_as = HERMES[:7], FinishReason.LENGTH
    choice = await ask(client, engine)
    assert choice["finish_reason"] == "length"
    assert called(choice["message"]) == [("get_weather", '{"city": "Bonn"')]


@pytest.mark.parametrize(
    ("texts", "calls"),
    [
        (['[{"na', 'me"'], []),
        (['[{"name": "get_time", "parameters": {}}', ', {"name": '], [("get_time", "{}")]),
    ],
)
async def test_the_rest_of_a_required_list_that_is_cut_off_is_no_answer(client, engine, texts, calls):
    say(engine, *texts)
    engine.end_as = FinishReason.LENGTH
    choice = await ask(client, engine, tool_choice="required")
    assert (choice["message"]["content"] or "", called(choice["message"])) == ("", calls)
    assert choice["finish_reason"] == "length"
    told = await deltas(client, engine, tool_choice="required")
    assert not any(choice["delta"].get("content") for choice in told)


@pytest.mark.parametrize(
    ("texts", "fields", "reason"),
    [
        (['[{"name": "get_weather", "parameters": {"city": "Bo'], {"tool_choice": "required"}, "stop"),
        (['[{"name": "get_time", "parameters": {}}'], {"tool_choice": "required"}, "tool_calls"),
        (["[{"], {"tool_choice": "required"}, "stop"),
        (['{"city": "Bo'], {"tool_choice": NAMED}, "stop"),
        (['<tool_call>{"name": "get_weather", "arguments": {"ci'], {}, "stop"),
        (['<tool_call>{"name": "get_time"}', "</tool_call> Bye"], {}, "tool_calls"),
        (
            ['<tool_call>{"name": "get_time"}{"name": "get_weather", "arguments": {"ci'],
            {"parallel_tool_calls": False},
            "tool_calls",
        ),
    ],
)
async def test_a_stop_string_inside_of_a_call_ends_for_stop(client, engine, texts, fields, reason):
    say(engine, *texts)
    engine.stop_reason = "nn"
    assert (await ask(client, engine, **fields))["finish_reason"] == reason
    told = await deltas(client, engine, **fields)
    assert [choice["finish_reason"] for choice in told if choice["finish_reason"]] == [reason]


async def test_a_mistral_call_with_a_stop_string_in_it_ends_for_stop(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="[TOOL_CALLS]")
    say(engine, '[TOOL_CALLS]get_weather[ARGS]{"city": "Bo')
    assert (await ask(client, engine))["finish_reason"] == "tool_calls"
    engine.stop_reason = "nn"
    assert (await ask(client, engine))["finish_reason"] == "stop"


async def test_text_on_both_sides_of_a_call_stays_apart(client, engine):
    say(engine, "Wait.\n", '<tool_call>{"name": "get_time"', "}</tool_call>\n", " Done.\n")
    message = (await ask(client, engine))["message"]
    assert (message["content"], called(message)) == ("Wait.\n\n Done.\n", [("get_time", "{}")])
    told = await deltas(client, engine)
    assert "".join(choice["delta"].get("content") or "" for choice in told) == message["content"]


@pytest.mark.parametrize("place", ["string", "in const"])
async def test_a_format_that_json_schema_does_not_know_changes_nothing(client, engine, place):
    say(engine, "[]")
    field = {"type": "string", "format": "password"} if place == "string" else {"const": {"format": "x"}}
    schema = {"type": "object", "properties": {"format": field}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    await ask(client, engine, tools=[tool], tool_choice="required")
    expected = {"type": "string"} if place == "string" else field
    assert schema_of(engine)["$defs"]["tool0"]["properties"]["format"] == expected


async def test_every_choice_has_calls_of_its_own(client, engine):
    body = {**BODY, "max_tokens": len(HERMES), "n": 2}
    choices = (await client.post(CHAT, json=body)).json()["choices"]
    assert [called(choice["message"]) for choice in choices] == [CALLS, CALLS]
    ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
    assert len(ids) == 4


async def test_calls_are_parsed_behind_the_reasoning(client, engine):
    engine.model_info = dataclasses.replace(engine.model_info, chat_template="<tool_call></think>")
    say(engine, "<think>I could <tool_call>", "</think>\n", *HERMES)
    message = (await ask(client, engine))["message"]
    assert (message["reasoning"], message["content"]) == ("I could <tool_call>", "Let me look.")
    assert called(message) == CALLS


async def test_calls_to_which_the_model_gives_one_id_have_two(client, engine):
    """OpenAI's client refuses a response with one, and no result could say which call it answers."""
    engine.model_info = dataclasses.replace(engine.model_info, chat_template="<|tool_calls_section_begin|>")
    one = "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    say(engine, one, one)
    first, second = (await ask(client, engine))["message"]["tool_calls"]
    assert first["id"] == "functions.get_time:0" != second["id"]


async def test_mistrals_calls_have_ids_that_its_template_takes(client, engine):
    engine.model_info = dataclasses.replace(engine.model_info, chat_template="[TOOL_CALLS]")
    say(engine, "[TOOL_CALLS]get_time[ARGS]", "{}")
    (call,) = (await ask(client, engine))["message"]["tool_calls"]
    assert re.fullmatch(r"[A-Za-z0-9]{9}", call["id"])


async def test_a_conversation_with_calls_reaches_the_template(client, engine):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
        {"role": "tool", "tool_call_id": "other", "name": "clock", "content": ""},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "name": "bot"},
        {"role": "assistant", "refusal": "Never."},
    ]
    await ask(client, engine, messages=messages)
    assert engine.chats[0][0][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_time", "content": "noon"},
        {"role": "tool", "tool_call_id": "other", "name": "clock", "content": ""},
        {"role": "assistant", "content": "No.", "name": "bot"},
        {"role": "assistant", "content": "Never."},
    ]


async def test_where_calls_cannot_be_read_only_a_grammar_can_make_them(engine):
    async with connect(build_app(engine, Settings(tool_call_parser="none"))) as client:
        response = await client.post(CHAT, json=BODY)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert "--tool-call-parser" in error["message"]
        say(engine, '{"city": "Bonn"}')
        assert called((await ask(client, engine, tool_choice=NAMED))["message"]) == CALLS[:1]


async def test_the_option_sets_the_dialect_whatever_the_template_says(engine):
    say(engine, '{"name": "get_time", "parameters": {}}')
    async with connect(build_app(engine, Settings(tool_call_parser="llama3_json"))) as client:
        assert called((await ask(client, engine))["message"]) == [("get_time", "{}")]


async def test_a_schema_that_cannot_be_compiled_is_the_callers_to_change(client, engine):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"title": "refuse"}}}]
    response = await client.post(CHAT, json={**BODY, "tools": tools, "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[0].function.parameters")


def test_a_description_is_not_mistaken_for_a_grammar() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"title": "root ::= x"}}}]
    body = ChatCompletionRequest.model_validate({**BODY, "tools": tools, "tool_choice": "required"})
    grammar = tool_use_of(body, None).grammar()
    assert "::=" not in grammar.text
    assert "root ::= x" in str(json.loads(grammar.text.removeprefix("start: %json ")))


def test_references_of_a_tools_schema_hold_in_the_list_of_calls() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "kind": {"$ref": "#/definitions/kind"}},
        "definitions": {"kind": {"enum": ["a", "b"]}},
        "additionalProperties": False,
    }
    tools = [WEATHER, {"type": "function", "function": {"name": "tree", "parameters": tree}}, TIME]
    body = ChatCompletionRequest.model_validate({**BODY, "tools": tools, "tool_choice": "required"})
    grammar = tool_use_of(body, find_dialect("hermes", "")).grammar()
    schema = json.loads(grammar.text.removeprefix("start: %json "))
    validator.check_schema(schema)

    def holds(*calls: tuple[str, dict]) -> bool:
        return validator(schema).is_valid([{"name": name, "parameters": given} for name, given in calls])

    assert holds(
        ("tree", {"next": {"next": {"kind": "a"}}}), ("get_weather", {"city": "Bonn"}), ("get_time", {})
    )
    assert not holds()
    assert not holds(("tree", {"next": {"kind": "c"}}))
    assert not holds(("get_weather", {"city": 5}))
    assert not holds(("get_weather", {}))
    assert not holds(("get_time", {"a": 1}))
    assert not holds(("unheard_of", {}))
