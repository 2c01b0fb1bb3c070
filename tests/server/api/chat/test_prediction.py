"""A prediction goes to the engine as tokens, and usage says what became of it."""

import dataclasses
import json

import pytest

from tests.server.fake_engine import INFO, FakeEngine

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}


@pytest.fixture
def verifying(engine: FakeEngine) -> FakeEngine:
    engine.model_info = dataclasses.replace(INFO, max_drafts=8)
    return engine


@pytest.mark.parametrize(
    "content", ["abc", [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]], ids=["text", "parts"]
)
async def test_its_tokens_go_to_the_engine_and_usage_counts_those_that_held(client, verifying, content):
    response = await client.post(CHAT, json={**HI, "prediction": {"type": "content", "content": content}})
    assert response.status_code == 200, response.text
    (request,) = verifying.requests
    assert request.prediction == (*b"abc", 1), "encoded without special tokens"
    details = response.json()["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 3}


async def test_a_stream_counts_them_too_and_tokens_beyond_the_reply_are_cut(client, verifying):
    prediction = {"type": "content", "content": "abcdefghi"}
    body = {**HI, "prediction": prediction, "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(CHAT, json=body)
    assert verifying.requests[0].prediction == tuple(b"abcdef")
    events = [
        line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")
    ]
    details = json.loads(events[-1])["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 1}


async def test_an_image_cannot_be_predicted(client, verifying):
    content = [{"type": "image_url", "text": "x"}]
    response = await client.post(CHAT, json={**HI, "prediction": {"type": "content", "content": content}})
    assert response.json()["error"]["param"] == "prediction.content"
