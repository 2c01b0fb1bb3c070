"""The real OpenAI SDK against /v1/responses, and the bytes of a stream to the letter."""

from collections.abc import AsyncIterator

import openai
import pydantic
import pytest

from engine.errors import RequestFailed
from engine.types import FinishReason
from tests.server.api.responses.test_responses import without_chance
from tests.server.golden import check_golden


@pytest.fixture
async def sdk(url) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_a_stream_is_framed_as_openai_frames_it(client, engine):
    engine.end_as = FinishReason.STOP
    body = {"input": "hi", "max_output_tokens": 2, "stream": True, "temperature": 0, "metadata": {"k": "v"}}
    check_golden("responses_text", without_chance((await client.post("/v1/responses", json=body)).text))


async def test_a_response_and_the_next_one(sdk, engine):
    first = await sdk.responses.create(model="fake", input="hi", max_output_tokens=2, instructions="x")
    assert first.output_text == "XH"
    assert first.status == "incomplete"
    assert first.usage.output_tokens == 2
    second = await sdk.responses.create(
        model="fake", input="and?", previous_response_id=first.id, max_output_tokens=2
    )
    assert second.previous_response_id == first.id
    assert [message["content"] for message in engine.chats[-1][0]] == ["hi", "XH", "and?"]


async def test_what_the_sdk_returned_can_be_sent_back_as_input(sdk, engine):
    first = await sdk.responses.create(model="fake", input="hi", max_output_tokens=2, store=False)
    items = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "on"}]
    await sdk.responses.create(model="fake", input=items, max_output_tokens=2)
    assert [message["content"] for message in engine.chats[-1][0]] == ["hi", "HI", "on"]


async def test_retrieve_and_delete(sdk):
    made = await sdk.responses.create(model="fake", input="hi", max_output_tokens=2)
    assert (await sdk.responses.retrieve(made.id)).output_text == "HI"
    await sdk.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.responses.retrieve(made.id)
    assert caught.value.code == "response_not_found"


async def test_the_sdks_own_accumulator_understands_the_stream(sdk, engine):
    engine.end_as = FinishReason.STOP
    async with sdk.responses.stream(model="fake", input="hi", max_output_tokens=3) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots == ["H", "HI", "HIH"]
    assert final.output_text == "HIH"
    assert final.usage.output_tokens == 3


async def test_a_plain_stream_that_breaks_is_told(sdk, engine):
    engine.error_after, engine.error = 1, RequestFailed("no")
    events = [event async for event in await sdk.responses.create(model="fake", input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"


class Person(pydantic.BaseModel):
    name: str


async def test_parsed_text_follows_the_schema_that_was_sent(sdk, engine):
    engine.end_as, engine.texts = FinishReason.STOP, ('{"name":', '"Ada"}')
    response = await sdk.responses.parse(model="fake", input="who?", text_format=Person, max_output_tokens=2)
    assert response.output_parsed == Person(name="Ada")
    assert response.text.format.name == "Person"
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    assert '"name"' in grammar.text


async def test_a_mistake_is_a_bad_request_with_the_field(sdk):
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.responses.create(model="fake", input="hi", conversation="conv_1")
    assert (caught.value.param, caught.value.code) == ("conversation", "unsupported_parameter")
