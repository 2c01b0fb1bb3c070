"""Streams of completions, to the letter: framing, order of fields, usage, errors, [DONE]."""

import pytest

from engine.errors import RequestFailed
from engine.types import FinishReason
from tests.server.conftest import connect, impatient
from tests.server.golden import check_golden

PROMPT = {"prompt": "hi", "max_tokens": 2, "stream": True}
BODIES = {
    "completion": PROMPT,
    "completion_usage": {**PROMPT, "n": 2, "stream_options": {"include_usage": True}},
    "completion_continuous_usage": {
        **PROMPT,
        "prompt": ["hi", "a"],
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "completion_echo_logprobs": {**PROMPT, "echo": True, "logprobs": 2},
    "completion_prompt_alone": {**PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0},
    "completion_token_ids": {**PROMPT, "return_token_ids": True},
}


@pytest.mark.parametrize("name", sorted(BODIES))
async def test_a_golden_stream(client, name):
    check_golden(name, (await client.post("/v1/completions", json=BODIES[name])).text)


async def test_a_golden_stream_that_ends_in_an_error(client, engine):
    engine.error_after, engine.error = 1, RequestFailed("logits are not finite")
    check_golden("completion_error", (await client.post("/v1/completions", json=PROMPT)).text)


async def test_a_golden_stream_that_ends_by_a_time_limit(client, engine):
    engine.end_as = FinishReason.EXPIRED
    check_golden("completion_timeout", (await client.post("/v1/completions", json=PROMPT)).text)


async def test_a_golden_stream_that_is_slow_to_begin(engine):
    engine.pause_s = 0.03
    async with connect(impatient(engine, keep_alive_s=0.02)) as client:
        response = await client.post("/v1/completions", json={**PROMPT, "max_tokens": 1})
    check_golden("completion_keep_alive", response.text)
