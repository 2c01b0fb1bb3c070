"""Tool calls over real HTTP: the grammar makes them where the model, that never saw a tool, could not."""

import json
from collections.abc import AsyncIterator
from typing import Literal

import openai
import pydantic
import pytest

from tests.e2e.serving import RunningServer

HI = [{"role": "user", "content": "What is the weather in Bonn?"}]


class GetWeather(pydantic.BaseModel):
    """Weather of a city."""

    city: str = pydantic.Field(max_length=20)
    unit: Literal["C", "F"]


class Point(pydantic.BaseModel):
    x: int = pydantic.Field(ge=-9, le=9)
    y: int = pydantic.Field(ge=-9, le=9)


class Draw(pydantic.BaseModel):
    """A line."""

    start: Point
    end: Point


WEATHER = openai.pydantic_function_tool(GetWeather)
DRAW = openai.pydantic_function_tool(Draw)


@pytest.fixture
async def sdk(demo_server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def wild(**fields: object) -> dict[str, object]:
    return {
        "model": "tokenyard-demo",
        "messages": HI,
        "temperature": 1.5,
        "seed": 3,
        "max_tokens": 200,
        **fields,
    }


async def test_a_required_call_is_parsed_into_its_model(sdk) -> None:
    reply = await sdk.chat.completions.parse(
        **wild(tools=[WEATHER, DRAW], tool_choice="required", parallel_tool_calls=False, n=3)
    )
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert isinstance(call.function.parsed_arguments, GetWeather | Draw)


async def test_a_named_call_is_parsed_into_its_model(sdk) -> None:
    named = {"type": "function", "function": {"name": "Draw"}}
    reply = await sdk.chat.completions.parse(**wild(tools=[WEATHER, DRAW], tool_choice=named))
    (call,) = reply.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Draw)
    assert reply.choices[0].finish_reason == "stop"


async def test_the_events_of_a_stream_come_to_the_same_call(sdk) -> None:
    fields = wild(tools=[WEATHER, DRAW], tool_choice="required", parallel_tool_calls=False)
    whole = await sdk.chat.completions.parse(**fields)
    async with sdk.chat.completions.stream(**fields) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert call.function == whole.choices[0].message.tool_calls[0].function
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 3
    assert "".join(event.arguments_delta for event in pieces) == call.function.arguments
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.parsed_arguments) == (call.function.name, call.function.parsed_arguments)


async def test_a_tool_loop_goes_round(sdk) -> None:
    """Call, answer, and then a reply without tools: what an agent does."""
    messages = [*HI]
    named = {"type": "function", "function": {"name": "GetWeather"}}
    reply = await sdk.chat.completions.create(**wild(messages=messages, tools=[WEATHER], tool_choice=named))
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["unit"] in "CF"
    messages += [message, {"role": "user", "content": "Rain, at 12 degrees."}]
    last = await sdk.chat.completions.create(
        **wild(messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=20)
    )
    assert last.choices[0].message.content
    assert last.choices[0].message.tool_calls is None


async def test_a_first_agent_goes_round_on_the_demo_model_with_nothing_set(sdk) -> None:
    """Tools and nothing else, as in the first example of every client: a call, its result, an answer."""
    messages: list = [*HI]
    fields = {"model": "tokenyard-demo", "tools": [WEATHER, DRAW], "max_tokens": 200}
    reply = await sdk.chat.completions.parse(messages=messages, **fields)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    messages.append(choice.message)
    for call in choice.message.tool_calls:
        assert isinstance(call.function.parsed_arguments, GetWeather | Draw)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "It is 5."})
    last = await sdk.chat.completions.create(messages=messages, **fields)
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].message.content
    assert last.choices[0].message.tool_calls is None


async def test_a_streamed_agent_turn_is_the_whole_one(sdk) -> None:
    fields = wild(tools=[WEATHER], parallel_tool_calls=False, temperature=0)
    whole = await sdk.chat.completions.create(**fields)
    async with sdk.chat.completions.stream(**fields) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    (call,), (streamed,) = whole.choices[0].message.tool_calls, final.choices[0].message.tool_calls
    assert streamed.function.name == call.function.name
    assert streamed.function.arguments == call.function.arguments


@pytest.mark.night
async def test_a_model_without_a_dialect_writes_text_or_calls_that_match(equipped_server) -> None:
    url = f"{equipped_server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
        reply = await sdk.chat.completions.create(
            model="tokenyard-demo",
            messages=[{"role": "user", "content": "Write a JSON object."}],
            tools=[WEATHER, DRAW],
            temperature=2.0,
            seed=1,
            n=8,
            max_tokens=60,
        )
        for choice in reply.choices:
            assert "<tool_call>" not in (choice.message.content or "")
        reply = await sdk.chat.completions.create(
            model="tokenyard-demo",
            messages=[*HI, {"role": "assistant", "content": "<tool_call>"}],  # as if it had begun a call
            tools=[WEATHER],
            max_tokens=200,
            parallel_tool_calls=False,
            extra_body={"continue_final_message": True},
        )
        (call,) = reply.choices[0].message.tool_calls
        assert GetWeather.model_validate_json(call.function.arguments)
