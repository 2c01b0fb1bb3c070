"""Requests and tokens a minute for each key: what counts, what is refused, and what the headers tell."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator

import openai
import pytest

from engine.errors import RequestRejected
from server.api.batches.app_client import AppClient
from server.api.batches.places import FairPlaces
from server.api.batches.queue import BatchQueue
from server.app import build_app
from server.edge.access.key_ring import KeyRing
from server.edge.access.rate_limits import Allowance, Caller, RateLimits
from server.edge.error_replies import RateLimited
from tests.server.conftest import EDGE, Settings, connect, eventually, serving
from tests.server.edge.access.test_key_ring import BODY, as_key, guarded, key


class Clock:
    """The clock of the counts."""

    def __init__(self) -> None:
        self.now_s = 60_000.0

    def time(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr("limits.storage.memory.time", clock)
    return clock


def limited(**limits: int) -> dict[str, object]:
    return {f"max_{name}_per_minute": num for name, num in limits.items()}


async def test_requests_of_a_minute_are_counted_and_the_next_one_is_told_when_to_come(engine, clock):
    async with guarded(engine, key("a", **limited(requests=2)), key("b")) as client:
        replies = [await client.post("/v1/completions", json=BODY, headers=as_key("a")) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["1", "0", "0"]
        assert replies[0].headers["x-ratelimit-limit-requests"] == "2"
        assert replies[0].headers["x-ratelimit-reset-requests"] == "120.000s"
        assert "x-ratelimit-limit-tokens" not in replies[0].headers
        refused = replies[-1]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        other = await client.post("/v1/completions", json=BODY, headers=as_key("b"))
        assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]
        clock.now_s += int(refused.headers["retry-after"]) - 1
        assert (await client.post("/v1/completions", json=BODY, headers=as_key("a"))).status_code == 429
        clock.now_s += 1
        assert (await client.post("/v1/completions", json=BODY, headers=as_key("a"))).status_code == 200


async def test_tokens_of_prompts_count_at_once_and_those_of_outputs_when_they_are_there(engine, url):
    app = build_app(engine.__class__(), Settings(), keys=KeyRing([key("a", **limited(tokens=20))]))
    async with serving(app) as base, openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="secret of a") as sdk:
        first = await sdk.completions.with_raw_response.create(model="fake", prompt="12345678", max_tokens=6)
        assert first.headers["x-ratelimit-limit-tokens"] == "20"
        assert first.headers["x-ratelimit-remaining-tokens"] == "12"
        second = await sdk.completions.with_raw_response.create(model="fake", prompt="1", max_tokens=1)
        assert second.headers["x-ratelimit-remaining-tokens"] == "5"
        with pytest.raises(openai.RateLimitError, match="20 tokens a minute"):
            await sdk.with_options(max_retries=0).completions.create(
                model="fake", prompt="12345", max_tokens=1
            )
        with pytest.raises(openai.BadRequestError, match="21 tokens"):
            await sdk.completions.create(model="fake", prompt="x" * 21, max_tokens=1)


async def test_an_output_without_end_stands_against_the_requests_after_it(engine, clock):
    async with guarded(engine, key("a", **limited(tokens=20))) as client:
        body = BODY | {"prompt": "12", "max_tokens": 58}
        assert (await client.post("/v1/completions", json=body, headers=as_key("a"))).status_code == 200
        refused = await client.post("/v1/completions", json=body, headers=as_key("a"))
        assert refused.status_code == 429
        clock.now_s += 60  # a whole minute is not enough: 60 were used of 20
        assert (await client.post("/v1/completions", json=body, headers=as_key("a"))).status_code == 429
        clock.now_s += 45
        assert (await client.post("/v1/completions", json=body, headers=as_key("a"))).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}, "anthropic"),
        ("/api/chat", {"model": "fake", "messages": [{"role": "user", "content": "x"}]}, "ollama"),
        ("/v1/responses", {"input": "x"}, "openai"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "openai"),
    ],
)
async def test_the_refusal_has_the_shape_of_the_protocol(engine, path, body, kind):
    async with guarded(engine, key("a", **limited(requests=1))) as client:
        for _ in range(2):
            reply = await client.post(path, json=body, headers=as_key("a"))
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) >= 1
    error = reply.json()["error"]
    if kind == "anthropic":
        assert (reply.json()["type"], error["type"]) == ("error", "rate_limit_error")
    elif kind == "ollama":
        assert "1 requests a minute" in error
    else:
        assert error["type"] == "rate_limit_error"


async def test_truncation_by_trial_counts_the_prompt_once(engine):
    app = build_app(engine, Settings(), keys=KeyRing([key("a", **limited(tokens=1000))]))
    items = [{"role": "user", "content": f"{place:010d}"} for place in range(30)]
    async with connect(app) as client:
        body = {"input": items, "truncation": "auto", "max_output_tokens": 8}
        reply = await client.post("/v1/responses", json=body, headers=as_key("a"))
    used = reply.json()["usage"]["input_tokens"] + 8
    reading = Allowance(app.state.keys.rates, key("a", **limited(tokens=1000)), Caller.CLIENT)
    assert reading.headers()["x-ratelimit-remaining-tokens"] == str(1000 - used)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_in_the_background_counts_once(engine, stream):
    app = build_app(engine, Settings(), keys=KeyRing([key("a", **limited(tokens=100, requests=9))]))
    async with connect(app) as client:
        body = {"input": "1234", "background": True, "stream": stream, "max_output_tokens": 3}
        made = await client.post("/v1/responses", json=body, headers=as_key("a"))
        await eventually(lambda: not app.state.background._works)
        response_id = re.search("resp_[0-9a-f]+", made.text)[0]
        assert (await client.get(f"/v1/responses/{response_id}", headers=as_key("a"))).status_code == 200
        reply = await client.post("/v1/completions", json=BODY, headers=as_key("a"))
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) == 100 - 4 - 3 - len(BODY["prompt"])
    assert reply.headers["x-ratelimit-remaining-requests"] == "7"


def test_a_prompt_that_is_made_again_counts_no_more_and_gives_no_request_back():
    rates, owner = RateLimits(), key("a", **limited(tokens=10, requests=5))
    first = Allowance(rates, owner, Caller.CLIENT)
    first.take_request()
    first.take_prompt(6)
    first.settle(20)
    first.take_prompt(6)
    of_the_run_before = Allowance(rates, owner, Caller.CLIENT)
    with pytest.raises(RateLimited):
        of_the_run_before.take_prompt(6)
    assert first.headers()["x-ratelimit-remaining-requests"] == "4"


async def test_lines_of_a_batch_count_once_and_leave_half_to_clients(engine, tmp_path, clock):
    edge = dataclasses.replace(EDGE, state_folder=str(tmp_path / "state"), state_max_bytes=2**20)
    keys = KeyRing([key("a", **limited(requests=4, tokens=1000))])
    app = build_app(engine, Settings(edge=edge), keys=keys)
    lines = [
        json.dumps(
            {
                "custom_id": str(n),
                "method": "POST",
                "url": "/v1/completions",
                "body": BODY | {"max_tokens": 3},
            }
        )
        for n in range(4)
    ]
    async with connect(app) as client:
        files = {"file": ("in.jsonl", "\n".join(lines).encode()), "purpose": (None, "batch")}
        file_id = (await client.post("/v1/files", files=files, headers=as_key("a"))).json()["id"]
        body = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        assert (await client.post("/v1/batches", json=body, headers=as_key("a"))).status_code == 200
        queue = BatchQueue(app.state.desk, lambda owner: AppClient(app, owner=owner), FairPlaces(4))
        working = asyncio.create_task(queue.run())
        await eventually(lambda: len(engine.requests) == 2)
        await asyncio.sleep(0.05)
        assert len(engine.requests) == 2
        reply = await client.post("/v1/completions", json=BODY | {"max_tokens": 1}, headers=as_key("a"))
        assert reply.headers["x-ratelimit-remaining-requests"] == "1"
        num_prompt = len(BODY["prompt"])
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) == 1000 - 2 * (num_prompt + 3) - num_prompt
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    app.state.desk.close()


def test_a_refused_prompt_gives_its_request_back():
    rates = RateLimits()
    one = key("a", **limited(requests=10, tokens=10))
    Allowance(rates, one, Caller.CLIENT).take_prompt(8)
    again = Allowance(rates, one, Caller.CLIENT)
    again.take_request()
    assert again.headers()["x-ratelimit-remaining-requests"] == "9"
    with pytest.raises(RateLimited):
        again.take_prompt(5)
    assert again.headers()["x-ratelimit-remaining-requests"] == "10"
    with pytest.raises(RequestRejected, match="5 a minute for batches"):
        Allowance(rates, one, Caller.BATCH).take_prompt(6)


def test_the_wait_that_is_named_is_the_one_that_is_needed(clock):
    rates = RateLimits()
    one = key("a", **limited(tokens=100))
    clock.now_s += 30
    allowance = Allowance(rates, one, Caller.CLIENT)
    allowance.take_prompt(80)
    for cost in (30, 100):
        with pytest.raises(RateLimited) as caught:
            Allowance(rates, one, Caller.CLIENT).take_prompt(cost)
        before_s = clock.now_s
        clock.now_s += caught.value.retry_after_s - 2
        with pytest.raises(RateLimited):
            Allowance(rates, one, Caller.CLIENT).take_prompt(cost)
        clock.now_s = before_s + caught.value.retry_after_s + 0.01
        Allowance(rates, one, Caller.CLIENT).take_prompt(cost)


def test_a_key_without_limits_needs_no_counts():
    rates = RateLimits()
    allowance = Allowance(rates, key("a"), Caller.CLIENT)
    allowance.take_request()
    allowance.take_prompt(10**9)
    allowance.settle(10**9)
    assert allowance.headers() == {}
    assert "_storage" not in vars(rates)
