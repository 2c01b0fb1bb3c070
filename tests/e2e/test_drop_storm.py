"""Crowds that leave, and crowds that are sent away, over real sockets with a real engine."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from campaigns.servers.processes import held_by
from tests.e2e.serving import RunningServer, running_server, wait_for

pytestmark = pytest.mark.alone

NUM_DROPS = 1000
NUM_AT_ONCE = 50
NUM_CLIENTS = 120
OVERLOAD_S = 4.0


async def drop(server: RunningServer, number: int, dice: random.Random) -> None:
    """Connect, ask (every fourth time only half), and leave without a word at any moment."""
    address = urlsplit(server.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    fields = {"max_tokens": 100, "stream": number % 2 == 0, "n": 1 + number % 3, "ignore_eos": True}
    if number % 5:
        path, body = "completions", {"prompt": f"hello {number}", **fields}
    else:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": f"{number}"}], **fields}
    content = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    writer.write((head + content)[: -5 if number % 4 == 3 else None])
    await writer.drain()
    await asyncio.sleep(dice.choice((0.0, 0.02, 0.2, 0.5)) * dice.random())
    writer.transport.abort()


async def test_a_thousand_that_drop_their_connections_leave_nothing(crowded_server: RunningServer) -> None:
    dice = random.Random(1)
    await asyncio.gather(*(drop(crowded_server, number, dice) for number in range(NUM_AT_ONCE)))
    await asyncio.to_thread(crowded_server.wait_until_idle)  # all threads there are have begun
    pids = crowded_server.process.pid, crowded_server.engine_pid
    before = [held_by(pid) for pid in pids]
    for start in range(0, NUM_DROPS, NUM_AT_ONCE):
        await asyncio.gather(*(drop(crowded_server, start + place, dice) for place in range(NUM_AT_ONCE)))
    await asyncio.to_thread(crowded_server.wait_until_idle)
    assert httpx.get(f"{crowded_server.url}/admin/requests").json()["requests"] == []

    def is_as_before() -> bool:
        after = [held_by(pid) for pid in pids]
        return all(
            now.num_files <= then.num_files and now.num_threads <= then.num_threads + 1
            for now, then in zip(after, before, strict=True)
        )

    wait_for(is_as_before)
    reply = httpx.post(
        f"{crowded_server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60
    )
    assert reply.status_code == 200


@pytest.fixture(scope="module")
def small_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Four run, eight wait."""
    limits = ("--max-num-seqs", "4", "--max-queued-requests", "8")
    with running_server(tmp_path_factory.mktemp("small"), str(tiny_model), *limits) as server:
        yield server


async def test_at_ten_times_the_capacity_everybody_is_served_or_refused_and_both_are_counted(
    small_server: RunningServer,
) -> None:
    seen: Counter[int] = Counter()
    ends_s = time.monotonic() + OVERLOAD_S

    async def insist(client: httpx.AsyncClient) -> None:
        while time.monotonic() < ends_s:
            body = {"prompt": "Once", "max_tokens": 16, "ignore_eos": True}
            reply = await client.post("/v1/completions", json=body)
            seen[reply.status_code] += 1
            if reply.status_code == 429:
                assert int(reply.headers["retry-after"]) >= 1
                assert reply.json()["error"]["code"] == "server_overloaded"
                await asyncio.sleep(0.2)
            else:
                assert reply.json()["usage"]["completion_tokens"] == 16

    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=small_server.url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(insist(client) for _ in range(NUM_CLIENTS)))
    assert seen.keys() == {200, 429}
    small_server.wait_until_idle()
    assert small_server.metric("tokenyard:admission_rejections_total") == seen[429]
    finished = small_server.metrics()['tokenyard:request_success_total{finished_reason="length"}']
    assert finished == seen[200]
