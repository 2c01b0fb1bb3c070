"""Promises of the scheduler, seen from outside: priorities, tenants, time limits, explanations."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import ROOT, RunningServer, running_server, wait_for

pytestmark = pytest.mark.night

NUM_SLOW = 200
"""Tokens of those who have both places."""


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "steps.jsonl"


@pytest.fixture(scope="module")
def priority_server(
    deep_model: Path, trace_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Two places only, so that a third request has to wait, or to send somebody away."""
    options = ("--max-num-seqs", "2", "--scheduling-policy", "priority", "--fairness", "tenant")
    more = ("--enable-admin", "--trace-steps", str(trace_file), "--no-enable-prefix-caching")
    with running_server(tmp_path_factory.mktemp("priority"), str(deep_model), *options, *more) as server:
        yield server


async def complete(
    server: RunningServer, max_tokens: int, *, headers: dict[str, str] | None = None, **fields: object
) -> httpx.Response:
    body = {"prompt": "Once upon", "max_tokens": max_tokens, "ignore_eos": True, **fields}
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{server.url}/v1/completions", json=body, headers=headers)


async def until(server: RunningServer, state: str, num: int, *tasks: "asyncio.Task[httpx.Response]") -> None:
    """Wait until `num` sequences are in that state. Raises AssertionError if a task ends before."""
    while server.metric(f"tokenyard:num_requests_{state}") < num:
        assert not any(task.done() for task in tasks), "they end too soon"
        await asyncio.sleep(0.01)


async def both_places_taken(server: RunningServer, **fields: object) -> list["asyncio.Task[httpx.Response]"]:
    before = server.metric("tokenyard:prompt_tokens_total")
    tasks = [asyncio.create_task(complete(server, NUM_SLOW, priority=9, **fields)) for _ in range(2)]
    await until(server, "running", 2, *tasks)
    assert server.metric("tokenyard:prompt_tokens_total") > before
    return tasks


async def test_an_urgent_request_overtakes_those_who_have_all_places(priority_server: RunningServer) -> None:
    slow = await both_places_taken(priority_server)
    answer = await complete(priority_server, 5, headers={"x-tokenyard-priority": "-1"})
    assert answer.status_code == 200
    assert not any(task.done() for task in slow), "it did not wait for one of them to end"
    await asyncio.gather(*slow)
    for task in slow:
        assert task.result().json()["usage"]["completion_tokens"] == NUM_SLOW
    displaced = 'tokenyard:num_preemptions_total{cause="displaced",mode="recompute"}'
    assert priority_server.metrics()[displaced] > 0


async def test_one_that_waits_too_long_gets_504_and_one_that_runs_too_long_what_it_has(
    priority_server: RunningServer,
) -> None:
    slow = await both_places_taken(priority_server)
    expired = await complete(priority_server, 5, priority=10, queue_timeout=0.05)
    assert expired.status_code == 504
    assert expired.json()["error"]["code"] == "deadline_exceeded"
    assert expired.headers["x-should-retry"] == "false"
    cut = await complete(priority_server, 480, priority=-5, timeout=0.2)
    (choice,) = cut.json()["choices"]
    assert choice["finish_reason"] == "timeout"
    assert 0 < cut.json()["usage"]["completion_tokens"] < 480
    await asyncio.gather(*slow)


async def test_the_admin_page_tells_who_runs_and_why_the_others_wait(priority_server: RunningServer) -> None:
    slow = await both_places_taken(priority_server, user="acme")
    waiting = asyncio.create_task(complete(priority_server, 5, priority=20))
    await until(priority_server, "waiting", 1, *slow)
    async with httpx.AsyncClient() as client:
        for _ in range(100):
            live = (await client.get(f"{priority_server.url}/admin/requests")).json()["requests"]
            if live[-1]["wait_reason"] != "step":  # a step has looked at it
                break
    assert [(one["state"], one["tenant"], one["wait_reason"]) for one in live] == [
        ("running", "acme", ""),
        ("running", "acme", ""),
        ("waiting", "", "places"),
    ]
    assert all(one["request_id"].startswith("cmpl-") for one in live)
    await asyncio.gather(*slow, waiting)


async def test_a_flood_of_one_tenant_delays_the_other_by_one_turn_only(
    priority_server: RunningServer,
) -> None:
    flood = [asyncio.create_task(complete(priority_server, 60, user="flood")) for _ in range(24)]
    await until(priority_server, "waiting", 10)
    await complete(priority_server, 5, headers={"x-tokenyard-tenant": "quiet"})
    num_done = sum(task.done() for task in flood)
    assert num_done < 12, "it did not wait for the whole flood"
    await asyncio.gather(*flood)


async def test_after_a_reset_nothing_cached_before_is_found(crowded_server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=crowded_server.url) as client:

        async def cached() -> int:
            body = {"prompt": [7] * 40, "max_tokens": 1}
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert await cached() == 0
        assert await cached() == 32
        assert (await client.post("/admin/reset_prefix_cache")).status_code == 204
        assert await cached() == 0


def test_the_trace_of_all_this_can_be_read(priority_server: RunningServer, trace_file: Path) -> None:
    priority_server.wait_until_idle()
    wait_for(lambda: "displaced" in trace_file.read_text())  # it is written a little later
    lines = [json.loads(line) for line in trace_file.read_text().rpartition("\n")[0].splitlines()]
    assert len(lines) > 100
    causes = {preemption["cause"] for line in lines for preemption in line["preemptions"]}
    assert "displaced" in causes
    shown = subprocess.run(
        [sys.executable, "-m", "server", "trace", str(trace_file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "displaced" in shown.stdout
