"""The SDK's own readers of tool calls and reasoning, on replies in a model's own dialect."""

import dataclasses
from collections.abc import AsyncIterator

import openai
import pydantic
import pytest

from engine.types import FinishReason
from tests.server.fake_engine import INFO

HI = [{"role": "user", "content": "hi"}]
TEXTS = (
    *("<think>", "Rain", "?", "</think>", "\n\n", "Let me look.\n"),
    *("<tool_call>\n", '{"name": "GetWeather", ', '"arguments": {"ci', 'ty": "Bo', 'nn"}}', "\n</tool_call>"),
)


class GetWeather(pydantic.BaseModel):
    city: str


FIELDS = {"model": "fake", "messages": HI, "max_tokens": len(TEXTS)}
TOOLS = [openai.pydantic_function_tool(GetWeather)]


@pytest.fixture
async def sdk(url, engine) -> AsyncIterator[openai.AsyncOpenAI]:
    engine.model_info = dataclasses.replace(INFO, chat_template="<tool_call> <think></think>")
    engine.texts, engine.end_as = TEXTS, FinishReason.STOP
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_a_call_is_parsed_into_the_tools_model(sdk):
    reply = await sdk.chat.completions.parse(**FIELDS, tools=TOOLS)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Bonn")
    assert (message.content, message.reasoning) == ("Let me look.", "Rain?")
    assert reply.usage.completion_tokens_details.reasoning_tokens == 4


async def test_the_events_of_a_stream_tell_content_and_arguments_apart(sdk):
    async with sdk.chat.completions.stream(**FIELDS, tools=TOOLS) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    content = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(content) == "Let me look."
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert [event.arguments_delta for event in pieces if event.arguments_delta] == [
        "{",
        '"city": "Bo',
        'nn"}',
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    message = final.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == (
        "Let me look.",
        "Rain?",
        "Rain?",
    )
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Bonn")


async def test_what_the_sdk_returned_can_be_sent_back(sdk, engine):
    message = (await sdk.chat.completions.create(**FIELDS, tools=TOOLS)).choices[0].message
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    await sdk.chat.completions.create(**{**FIELDS, "messages": [*HI, message, answer]}, tools=TOOLS)
    _, said, result = engine.chats[-1][0]
    assert said["tool_calls"][0]["function"] == {"name": "GetWeather", "arguments": '{"city": "Bonn"}'}
    assert said["reasoning_content"] == "Rain?"
    assert (result["role"], result["name"], result["content"]) == ("tool", "GetWeather", "rain")
