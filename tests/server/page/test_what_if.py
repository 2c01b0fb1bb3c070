"""Runs of the real simulator as a child of the server, within their bounds."""

import asyncio
from typing import Any

import orjson
import pytest

from engine.options.api_keys import ApiKey, digest_of
from server.app import build_app
from server.edge.access.key_ring import KeyRing
from server.page import what_if
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import FakeEngine

ROUTE = "/admin/what_if"


def step(number: int) -> dict[str, Any]:
    """One step of the trace: 4 decodes in 10 ms."""
    counts = ("num_swapped_out_blocks", "num_swapped_in_blocks", "num_running", "num_waiting", "num_swapped")
    lists = ("decodes", "chunks", "arrived", "new", "released", "ended", "preemptions")
    return {
        **{"step": number, "time_s": number / 100, "schedule_s": 0.001, "execute_s": 0.008},
        **{"update_s": 0.001, "num_tokens": 4, "num_decodes": 4, "num_context_tokens": 40 + number},
        **dict.fromkeys(counts, 0),
        **{name: [] for name in lists},
        **{"num_used_blocks": 4, "num_blocks": 64, "waiting": {}},
    }


def body(**changes: Any) -> dict[str, Any]:
    request = {"prompt_len": 16, "output_len": 8, "priority": 0, "tenant": ""}
    requests = [{"arrival_s": number / 50, **request} for number in range(20)]
    return {
        "steps": "".join(orjson.dumps(step(number)).decode() + "\n" for number in range(40)),
        "requests": "".join(orjson.dumps(each).decode() + "\n" for each in requests),
        **{"num_blocks": 64, "block_size": 16, "max_num_seqs": 4, "scheduling_policy": "fcfs"},
        "compare": "base,max_num_seqs=1+load=2",
        **changes,
    }


async def test_requests_are_simulated_under_each_setting_one_run_at_a_time() -> None:
    async with connect(build_app(FakeEngine(), Settings())) as client:
        running = asyncio.create_task(client.post(ROUTE, json=body(), timeout=60))
        while not what_if._running.locked():
            await asyncio.sleep(0)
        assert (await client.post(ROUTE, json=body())).status_code == 429
        reply = await running
    found = reply.json()
    assert reply.status_code == 200, found
    base, slow = found["runs"]
    assert [base["name"], slow["name"]] == ["base", "max_num_seqs=1+load=2"]
    assert [run["classes"][0]["num_completed"] for run in (base, slow)] == [20, 20]
    assert base["classes"][0]["ttft_ms"]["p50"] < slow["classes"][0]["ttft_ms"]["p50"]
    assert all(text.startswith("<svg") for text in found["pictures"].values())


@pytest.mark.parametrize(
    "compare",
    [
        *(
            "",
            "cells=2",
            "base,replicas=100",
            "num_blocks=10000000000",
            "base\n",
            "base --json=/x",
            "base," * 99,
        ),
        *(",".join(["base"] * 9), "num_blocks=1_0000_0000", "base,replicas=1_00"),
    ],
)
async def test_settings_beyond_the_bounds_are_refused_before_anything_runs(compare: str) -> None:
    async with connect(build_app(FakeEngine(), Settings())) as client:
        reply = await client.post(ROUTE, json=body(compare=compare))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "compare"), reply.text


async def test_a_setting_that_is_not_known_is_refused_with_those_that_are() -> None:
    async with connect(build_app(FakeEngine(), Settings())) as client:
        reply = await client.post(ROUTE, json=body(compare="base,nothing=1"), timeout=60)
    assert (reply.status_code, "there are load, replicas" in reply.text) == (400, True), reply.text


async def test_what_the_simulator_refuses_is_the_answer_without_a_folder() -> None:
    async with connect(build_app(FakeEngine(), Settings())) as client:
        reply = await client.post(ROUTE, json=body(requests="{}"), timeout=60)
    assert reply.status_code == 400
    assert "requests.jsonl:1: neither max_tokens" in (message := reply.json()["error"]["message"])
    assert "/" not in message


async def test_a_run_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "_WITHIN_S", 0.01)
    async with connect(build_app(FakeEngine(), Settings())) as client:
        reply = await client.post(ROUTE, json=body())
    assert (reply.status_code, "took more than" in reply.text) == (400, True)


async def test_a_run_that_writes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "_MAX_FILE_BYTES", 1000)
    async with connect(build_app(FakeEngine(), Settings())) as client:
        reply = await client.post(ROUTE, json=body(), timeout=60)
    assert (reply.status_code, "too large" in reply.text) == (400, True), reply.text


async def test_a_key_that_may_not_administer_simulates_nothing() -> None:
    chat = ApiKey(name="chat", digest=digest_of(b"c"), may_administer=False)
    async with connect(build_app(FakeEngine(), Settings(), keys=KeyRing((chat,)))) as client:
        statuses = [
            (await client.post(ROUTE, json=body(), headers=headers)).status_code
            for headers in ({}, {"authorization": "Bearer c"})
        ]
    assert statuses == [401, 403]
