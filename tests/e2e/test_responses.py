"""Responses on a real engine: whole, streamed, chained, and forgotten."""

import json

import openai
import pytest

from tests.e2e.serving import RunningServer


@pytest.fixture
def sdk(crowded_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{crowded_server.url}/v1", api_key="any", max_retries=0)


def test_a_stream_says_what_the_whole_response_says(sdk):
    asked = {"model": "tiny", "input": "hello", "max_output_tokens": 8, "extra_body": {"seed": 3}}
    whole = sdk.responses.create(**asked)
    assert whole.usage.output_tokens <= 8
    *_, last = list(sdk.responses.create(**asked, stream=True))
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    assert last.response.id != whole.id


def test_a_chain_finds_its_beginning_in_the_prefix_cache(sdk):
    first = sdk.responses.create(model="tiny", input="word " * 12, max_output_tokens=4)
    second = sdk.responses.create(
        model="tiny", input="and?", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    sdk.responses.delete(first.id)
    third = sdk.responses.create(
        model="tiny", input="on", previous_response_id=second.id, max_output_tokens=4
    )
    assert third.usage.input_tokens > second.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first.id)


def test_text_keeps_to_a_schema(sdk):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
    response = sdk.responses.create(
        model="tiny", input="hello", text=text, max_output_tokens=80, temperature=0
    )
    assert response.status == "completed"
    assert json.loads(response.output_text) in ({"n": 1}, {"n": 2})
