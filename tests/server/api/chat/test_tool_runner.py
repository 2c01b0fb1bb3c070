"""The OpenAI SDK's own loop of calls and answers, over our /v1/responses."""

import asyncio
from dataclasses import replace

import openai
import pydantic
import pytest
from openai.lib import pydantic_responses_function_tool

from engine.types import FinishReason
from tests.server.fake_engine import FakeEngine

tool_runner = pytest.importorskip("openai.lib.responses_tool_runner", reason="an SDK before 3.54")

CALL = ("<tool_call>", '{"name": "Add", "arguments"', ': {"a": 2, "b": 3}}', "</tool_call>")


class Add(pydantic.BaseModel):
    """Adds."""

    a: int
    b: int


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(end_as=FinishReason.STOP, texts=CALL)
    engine.model_info = replace(engine.model_info, chat_template="<tool_call> </tool_call>")
    return engine


@pytest.mark.parametrize("stream", [False, True])
async def test_the_runner_calls_the_function_and_hands_its_result_back(engine, url, stream):
    called = []

    def add(arguments: Add) -> str:
        called.append(arguments)
        engine.texts = ("It is ", "5", ".", "")
        return str(arguments.a + arguments.b)

    function = tool_runner.RegisteredFunction.from_tool(pydantic_responses_function_tool(Add), execute=add)

    def run() -> openai.types.responses.Response:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            params = {"model": "fake", "input": "What is 2 + 3?", "max_output_tokens": len(CALL)}
            return tool_runner.ResponsesToolRunner(functions=[function]).run(
                client, params, max_steps=3, stream=stream
            )

    last = await asyncio.to_thread(run)
    assert called == [Add(a=2, b=3)]
    assert last.output_text == "It is 5."
    assert [message["role"] for message in engine.chats[-1][0]] == ["user", "assistant", "tool"]
