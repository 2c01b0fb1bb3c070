"""The load client against a server that behaves, and against one that does not."""

import asyncio
import signal
import time
from dataclasses import replace

import pytest

from bench.load.client import (
    Endpoint,
    LoadRun,
    RequestRecord,
    RequestStyle,
    StreamEnd,
    UsageMode,
    first_model,
    measure_words,
)
from bench.load.workload import PlannedRequest, WordCost
from server.edge.http.http_client import ExchangeFailed, Target
from tests.bench.fake_openai import fake_openai

STYLE = RequestStyle(
    endpoint=Endpoint.COMPLETIONS,
    model="fake",
    temperature=0.5,
    ignores_eos=False,
    sends_priority=False,
    usage=UsageMode.CONTINUOUS,
    seed=100,
    timeout_s=5.0,
)


def planned(*prompts: str, max_tokens: int = 6) -> list[PlannedRequest]:
    return [
        PlannedRequest(index=n, prompt=prompt, max_tokens=max_tokens, priority=n, arrival_s=0.03 * n)
        for n, prompt in enumerate(prompts)
    ]


async def run_closed(
    target: Target, requests: list[PlannedRequest], style: RequestStyle = STYLE, concurrency: int = 4
) -> list[RequestRecord]:
    run = LoadRun(target, style, lambda record: None)
    return await run.run_closed(requests, concurrency=concurrency, max_duration_s=10.0)


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("usage", list(UsageMode))
async def test_a_stream_is_counted_and_timed(endpoint: Endpoint, usage: UsageMode) -> None:
    async with fake_openai() as (_, target):
        style = replace(STYLE, endpoint=endpoint, usage=usage)
        (record,) = await run_closed(target, planned("one two three"), style)
    assert record.is_completed
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (14, 4, 6)
    assert record.finish_reason == "length"
    assert len(record.chunk_gaps_s) == 2
    assert record.ttft_s is not None
    assert record.ttft_s + sum(record.chunk_gaps_s) <= record.e2e_s
    # Two tokens came with the first chunk, if the server says so; else it counts as one.
    later = 4 if usage is UsageMode.CONTINUOUS else 5
    assert record.tpot_s == pytest.approx(sum(record.chunk_gaps_s) / later)


async def test_a_request_says_what_was_asked_for_and_no_more() -> None:
    async with fake_openai() as (fake, target):
        await run_closed(replace(target, api_key="k"), planned("a"))
        extras = replace(STYLE, ignores_eos=True, sends_priority=True, usage=UsageMode.FINAL)
        await run_closed(target, planned("a", "b")[1:], extras)
    assert fake.requests[0] == {
        "model": "fake",
        "prompt": "a",
        "max_tokens": 6,
        "temperature": 0.5,
        "seed": 100,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert "Authorization: Bearer k" in fake.headers[0]
    assert fake.requests[1] == fake.requests[0] | {
        "prompt": "b",
        "seed": 101,
        "ignore_eos": True,
        "priority": 1,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("prompt", "outcome", "message"),
    [
        ("overloaded", "HTTP 429 rate_limit_exceeded", "try later"),
        ("html", "HTTP 502", "<html>proxy</html>"),
        ("reset", "connection reset", ""),
        ("close", "connection closed", "before the end"),
        ("error", "error event engine_died", "the engine died"),
        ("unfinished", "stream incomplete", "finish_reason"),
        ("unmarked", "stream incomplete", "[DONE]"),
        ("nonsense", "bad event", "not a chunk"),
        ("nohttp", "not HTTP", "SSH"),
        ("stall", "timeout", "within 0.2 s"),
    ],
)
async def test_trouble_is_one_failure_of_its_kind(prompt: str, outcome: str, message: str) -> None:
    async with fake_openai() as (_, target):
        requests = planned("fine", prompt, "fine")
        records = await run_closed(target, requests, replace(STYLE, timeout_s=0.2), concurrency=1)
    assert [record.outcome for record in records] == ["completed", outcome, "completed"]
    assert message in records[1].message


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    async with fake_openai() as (_, target):
        pass
    (record,) = await run_closed(target, planned("a"))
    assert record.outcome == "no connection"


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    async with fake_openai() as (fake, target):
        records = await run_closed(target, planned(*"abcdefghijkl"), concurrency=3)
    assert all(record.is_completed for record in records)
    assert fake.most_open == 3


async def test_an_open_loop_sends_at_the_arrivals() -> None:
    async with fake_openai() as (fake, target):
        run = LoadRun(target, replace(STYLE, timeout_s=0.5), lambda record: None)
        requests = planned("stall", "b", "c", "d")
        records = await run.run_open(requests, max_duration_s=10.0)
    assert [record.index for record in records] == [0, 1, 2, 3]
    for record, request in zip(records, requests, strict=True):
        assert record.start_s == pytest.approx(request.arrival_s + record.late_s, abs=0.01)
        assert record.start_s >= request.arrival_s
    assert fake.most_open >= 2  # nobody waited for the one that stalls


async def test_a_run_ends_when_its_time_is_over() -> None:
    async with fake_openai() as (_, target):
        start_s = time.perf_counter()
        run = LoadRun(target, STYLE, lambda record: None)
        records = await run.run_closed(planned("stall", "stall", "stall"), concurrency=2, max_duration_s=0.1)
    assert time.perf_counter() - start_s < 2
    # The third was never sent; what had come of the others stands.
    assert [record.outcome for record in records] == ["cut off", "cut off"]
    assert [record.num_output_tokens for record in records] == [1, 1]


async def test_an_open_run_ends_when_its_time_is_over() -> None:
    async with fake_openai() as (_, target):
        run = LoadRun(target, STYLE, lambda record: None)
        late = [replace(each, arrival_s=each.arrival_s * 1000) for each in planned("a", "b")]
        records = await asyncio.wait_for(run.run_open(late, max_duration_s=0.2), 30)
    assert not run.is_interrupted
    assert [record.index for record in records] == [0]


async def test_an_interrupt_ends_the_run_with_what_it_has() -> None:
    async with fake_openai() as (_, target):
        asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGINT)
        run = LoadRun(target, STYLE, lambda record: None)
        ending = run.run_closed(planned("a", "stall"), concurrency=4, max_duration_s=10.0)
        records = await asyncio.wait_for(ending, 30)
    assert run.is_interrupted
    assert [record.outcome for record in records] == ["completed", "cut off"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_the_first_model_is_taken() -> None:
    async with fake_openai() as (_, target):
        assert await first_model(target, timeout_s=2.0) == "fake"
    with pytest.raises(ExchangeFailed):
        await first_model(target, timeout_s=2.0)


async def test_words_are_measured_on_the_server() -> None:
    async with fake_openai() as (_, target):
        assert await measure_words(target, STYLE) == WordCost(per_word=3.0, per_prompt=5.0)


async def test_a_server_that_is_known_to_leave_out_done_is_whole_with_its_finish_reason() -> None:
    async with fake_openai() as (_, target):
        style = replace(STYLE, usage=UsageMode.FINAL, end=StreamEnd.FINISH_REASON)
        unmarked, unfinished = await run_closed(target, planned("unmarked", "unfinished"), style)
    assert unmarked.is_completed
    assert unmarked.num_output_tokens == 1
    assert unfinished.outcome == "stream incomplete"
