"""A rank of a divided model dies, or stands still, while requests are in flight."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import RunningServer, running_server, wait_for
from tests.faults.test_engine_death import KINDS, is_ready, reply_of

pytestmark = pytest.mark.night

RANKS = ("--num-threads", "1", "--dtype", "float32")
SHARDS, STAGES = "--tensor-parallel-size", "--pipeline-parallel-size"
WAITS_IN = ("has_any", "receive", "send")
"""Functions in which rank 0, the first stage, may wait for one that stands still."""


@pytest.fixture(scope="module", params=[SHARDS, STAGES])
def option(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(
    option: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("ranks")
    with running_server(
        folder, str(tiny_model), option, "2", *RANKS, "--heartbeat-timeout", "3", ready_within_s=300
    ) as server:
        yield server
        pids = pids_of(server)
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def rank_pid(server: RunningServer) -> int:
    engine_pid = server.engine_pid
    (child,) = Path(f"/proc/{engine_pid}/task/{engine_pid}/children").read_text().split()
    assert b"engine.core.rank_process" in Path(f"/proc/{child}/cmdline").read_bytes()
    return int(child)


def pids_of(server: RunningServer) -> list[int]:
    assert server.engine_pid is not None
    return [server.engine_pid, rank_pid(server)]


async def until_begun(server: RunningServer, num: int) -> None:
    while server.metric("tokenyard:num_requests_running") < num:
        await asyncio.sleep(0.02)


def test_replies_follow_their_grammar_whichever_rank_samples(server: RunningServer) -> None:
    wait_for(lambda: is_ready(server), within_s=300)
    asked = {"prompt": "Once", "max_tokens": 8, "n": 3, "structured_outputs": {"regex": "[ab]{4}"}}
    reply = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
    assert all(re.fullmatch("[ab]{4}", each["text"]) for each in reply.json()["choices"]), reply.text


@pytest.mark.parametrize("option", [SHARDS], indirect=True)
async def test_the_death_of_a_rank_costs_streams_a_pause_and_a_new_group_goes_on(
    server: RunningServer,
) -> None:
    wait_for(lambda: is_ready(server), within_s=300)
    assert server.metric("tokenyard:ranks") == 2
    pids = pids_of(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        undisturbed = await reply_of(client, KINDS[0])
        streams = [asyncio.create_task(reply_of(client, KINDS[0])) for _ in range(8)]
        await until_begun(server, 8)
        os.kill(pids[1], signal.SIGKILL)
        assert await asyncio.gather(*streams) == [undisturbed] * 8
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    server.wait_until_idle()
    assert "rank 1 (pid" in server.text()
    assert "most recent call first" in server.text(), "the stacks of rank 0"


@pytest.mark.parametrize("option", [STAGES], indirect=True)
async def test_a_rank_that_stands_still_is_found_and_the_stacks_of_the_others_are_in_the_log(
    server: RunningServer,
) -> None:
    wait_for(lambda: is_ready(server), within_s=300)
    pids = pids_of(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        stream = asyncio.create_task(reply_of(client, KINDS[0]))
        await until_begun(server, 1)
        before = len(server.text())
        os.kill(pids[1], signal.SIGSTOP)
        (choice,) = await stream
    assert choice.finish_reason == "length"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    found = server.text()[before:]
    assert "has not moved" in found
    assert any(f" in {name}\n" in found for name in WAITS_IN)
