"""Function calls and reasoning in /v1/responses: items of their own, in the order of the text."""

from dataclasses import replace

import openai
import pytest

from engine.types import FinishReason
from tests.server.api.responses.test_responses import PATH, create, events, refused, without_chance
from tests.server.fake_engine import FakeEngine
from tests.server.golden import check_golden

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "strict": True,
}
CALL = ("Let me see. ", "<tool_call>", '{"name": "add", "arguments"', ': {"a": 1}}', "</tool_call>")


@pytest.fixture
def engine() -> FakeEngine:
    """Writes calls as Hermes does, and may reason."""
    engine = FakeEngine(end_as=FinishReason.STOP, texts=CALL)
    engine.model_info = replace(engine.model_info, chat_template="<tool_call> <think> </think>")
    return engine


async def test_a_call_is_an_item_behind_the_text_before_it(client, engine):
    response = await create(client, tools=[TOOL], max_output_tokens=len(CALL))
    message, call = response["output"]
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (call["type"], call["name"], call["status"]) == ("function_call", "add", "completed")
    assert call["arguments"] == '{"a": 1}'
    assert call["call_id"].startswith("call_")
    assert response["status"] == "completed"
    assert response["tools"] == [TOOL]
    ((_, options),) = engine.chats
    assert options.tools[0]["function"]["name"] == "add"


async def test_a_call_that_a_stop_string_cuts_off_is_incomplete(client, engine):
    """Agents run complete ones, whose arguments are JSON."""
    engine.texts, engine.stop_reason = (*CALL[:-2], ': {"a": 1'), "5"
    response = await create(client, tools=[TOOL], max_output_tokens=len(engine.texts))
    _, call = response["output"]
    assert (call["arguments"], call["status"], response["status"]) == ('{"a": 1', "incomplete", "completed")


async def test_texts_on_both_sides_of_a_call_can_be_joined(client, engine):
    engine.texts = (*CALL, "\n\n", "Done.")
    response = await create(client, tools=[TOOL], max_output_tokens=len(engine.texts))
    first, _, second = response["output"]
    assert [item["content"][0]["text"] for item in (first, second)] == ["Let me see.", " \n\nDone."]


async def test_a_streamed_call_comes_in_pieces(client):
    body = {"input": "hi", "tools": [TOOL], "max_output_tokens": len(CALL), "stream": True}
    stream = events(await client.post(PATH, json=body))
    types = [event["type"].removeprefix("response.") for event in stream]
    second = types.index("output_item.added", types.index("output_item.added") + 1)
    assert types[second - 1] == "output_item.done"
    rest = [name for place, name in enumerate(types[second:]) if types[second + place - 1] != name]
    assert rest == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event["delta"] for event in stream if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == stream[-3]["arguments"] == '{"a": 1}'
    assert stream[second]["item"]["status"] == "in_progress"
    assert [event["output_index"] for event in stream[second:-1]] == [1] * (len(stream) - second - 1)


async def test_the_output_of_a_call_goes_back_with_the_conversation(client, engine):
    first = await create(client, tools=[TOOL], max_output_tokens=len(CALL))
    call_id = first["output"][-1]["call_id"]
    engine.texts = ("2",)
    output = [{"type": "function_call_output", "call_id": call_id, "output": "2"}]
    body = {"input": output, "previous_response_id": first["id"], "max_output_tokens": 1}
    assert (await create(client, **body))["output"][0]["content"][0]["text"] == "2"
    user, assistant, tool = engine.chats[-1][0]
    assert user["content"] == "hi"
    assert assistant["content"].strip() == "Let me see."
    assert assistant["tool_calls"][0]["id"] == call_id
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert (tool["role"], tool["content"], tool["name"]) == ("tool", "2", "add")


async def test_two_calls_of_one_turn_are_one_message(client, engine):
    items = [
        {"role": "user", "content": "hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
    ]
    await create(client, input=items, max_output_tokens=1)
    _, assistant, *outputs = engine.chats[-1][0]
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert assistant["reasoning_content"] == "hm"
    assert [message["content"] for message in outputs] == ["1", "2"]


async def test_what_an_assistant_said_twice_is_two_messages(client, engine):
    items = [{"role": role, "content": role} for role in ("user", "assistant", "assistant")]
    items.append({"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]})
    await create(client, input=[*items, {"role": "user", "content": "on"}], max_output_tokens=1)
    messages = engine.chats[-1][0]
    assert [message["role"] for message in messages] == ["user", *["assistant"] * 3, "user"]
    assert [message["content"] for message in messages[1:4]] == ["assistant", "assistant", ""]
    assert messages[3]["reasoning_content"] == "hm"


async def test_each_call_of_a_response_is_an_item(client, engine):
    engine.texts = (*CALL, *CALL[1:])
    stream = events(
        await client.post(
            PATH,
            json={"input": "hi", "tools": [TOOL], "max_output_tokens": len(engine.texts), "stream": True},
        )
    )
    _, first, second = stream[-1]["response"]["output"]
    assert first["arguments"] == second["arguments"] == '{"a": 1}'
    assert first["call_id"] != second["call_id"]
    assert [event["item"] for event in stream if event["type"] == "response.output_item.done"][1:] == [
        first,
        second,
    ]


async def test_a_named_function_is_called_by_a_grammar(client, engine):
    engine.texts = ('{"a"', ": 1}")
    choice = {"type": "function", "name": "add"}
    response = await create(client, tools=[TOOL], tool_choice=choice, max_output_tokens=2)
    (call,) = response["output"]
    assert (call["name"], call["arguments"]) == ("add", '{"a": 1}')
    assert response["tool_choice"] == choice
    assert '"a"' in engine.requests[-1].params.grammar.text


async def test_reasoning_is_an_item_before_the_answer(client, engine):
    engine.texts = ("<think>", "hm", "</think>", "yes")
    response = await create(client, max_output_tokens=4)
    reasoning, message = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "yes"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    stream = events(await client.post(PATH, json={"input": "hi", "max_output_tokens": 4, "stream": True}))
    types = [event["type"].removeprefix("response.") for event in stream]
    assert types[2:8] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert stream[-1]["response"]["output"][0]["content"] == reasoning["content"]


async def test_a_stream_with_everything_is_framed_as_openai_frames_it(client, engine):
    engine.texts = ("<think>", "hm", "</think>", *CALL)
    body = {"input": "hi", "tools": [TOOL], "max_output_tokens": len(engine.texts), "stream": True, "seed": 1}
    check_golden("responses_tools", without_chance((await client.post(PATH, json=body)).text))


async def test_logprobs_of_reasoning_are_not_those_of_the_answer(client, engine):
    engine.texts = ("<think>", "hm", "</think>", "yes")
    response = await create(client, max_output_tokens=4, include=["message.output_text.logprobs"])
    (answer,) = [item for item in response["output"] if item["type"] == "message"]
    assert [token["token"] for token in answer["content"][0]["logprobs"]] == ["yes"]


async def test_the_sdk_accumulates_calls(engine, url):
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as sdk,
        sdk.responses.stream(model="fake", input="hi", tools=[TOOL], max_output_tokens=len(CALL)) as stream,
    ):
        final = await stream.get_final_response()
    assert final.output[-1].type == "function_call"
    assert final.output[-1].parsed_arguments == {"a": 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"title": "refuse"}}}},
            "text.format.schema",
        ),
        ({"reasoning": {"effort": "utmost"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "short"}}, "reasoning.summary"),
    ],
)
async def test_what_is_wrong_has_the_name_that_the_caller_used(client, body, param):
    error = await refused(client, **body)
    assert error["param"] == param
    for name in ("response_format", ".function", "reasoning_effort"):
        assert name not in error["message"]
