"""Drain of a server: accepted requests are finished, unless a second signal insists."""

import asyncio
import json
import re
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from tests.e2e.serving import RunningServer, running_server, wait_for
from tests.engine.grammars.test_grammar_compiler import ENDLESS, used_ticks
from tests.faults.clients import num_tokens_streamed

pytestmark = pytest.mark.night

DELAY_S = 2


async def stream(server: RunningServer, max_tokens: int) -> int:
    """The number of tokens of a whole stream."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        return await num_tokens_streamed(client, max_tokens, model="deep")


async def test_sigterm_finishes_accepted_streams_refuses_new_ones_and_exits_0(
    deep_model: Path,
    tmp_path: Path,
) -> None:
    with running_server(tmp_path, str(deep_model)) as server:
        accepted = [asyncio.create_task(stream(server, 200)) for _ in range(8)]
        await server.until_in_flight(8, *accepted)
        server.send(signal.SIGTERM)
        async with httpx.AsyncClient() as client:
            while (ready := await client.get(f"{server.url}/health/ready")).status_code == 200:
                await asyncio.sleep(0.01)
            refused = await client.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert ready.status_code == 503
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        # A kept connection, through a proxy that only moves bytes, would lead the retry here again.
        assert refused.headers["connection"] == "close"
        assert await asyncio.gather(*accepted) == [200] * 8
        assert await asyncio.to_thread(server.wait) == 0


async def test_what_does_not_finish_in_time_is_cut_off_with_an_error(
    deep_model: Path,
    tmp_path: Path,
) -> None:
    """A grammar under way too: the process that tries it goes with the others."""
    options = ("--shutdown-timeout", "0.2", "--max-num-batched-tokens", "64", "--max-num-seqs", "64")
    patient = ("--grammar-compile-timeout", "60s")
    with running_server(tmp_path, str(deep_model), *options, *patient) as server:
        assert server.grammar_pid is None, "it starts with the first grammar"
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": "[ab]"}}
            assert (await client.post("/v1/completions", json=asked)).status_code == 200
            pids = [server.process.pid, server.engine_pid, server.grammar_pid]
            busy_after = used_ticks(pids[-1]) + 5
            asked["structured_outputs"] = {"json": json.loads(ENDLESS.text)}
            hopeless = asyncio.create_task(client.post("/v1/completions", json=asked))
            while used_ticks(pids[-1]) < busy_after:
                assert not hopeless.done()
                await asyncio.sleep(0.02)
            streams = [asyncio.create_task(stream(server, 480)) for _ in range(16)]
            await server.until_in_flight(8, *streams)
            server.send(signal.SIGTERM)
            results = await asyncio.gather(*streams, return_exceptions=True)
            assert any("shutting down" in str(result) for result in results)
            await asyncio.gather(hopeless, return_exceptions=True)
        assert await asyncio.to_thread(server.wait) == 0
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def is_clean(refusal: APIStatusError) -> bool:
    """It says when to come back, and that it should be elsewhere."""
    headers = refusal.response.headers
    return (
        (refusal.status_code, refusal.code) == (503, "shutting_down")
        and int(headers["retry-after"]) >= 1
        and headers["connection"] == "close"
    )


async def ask_on(server: RunningServer, until: asyncio.Event) -> Counter[str]:
    """Ends of requests, one after the other, until there is no server any more."""
    ends = Counter[str]()
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        while not until.is_set():
            try:
                answer = await client.completions.create(
                    model="deep", prompt="Once", max_tokens=20, extra_body={"ignore_eos": True}
                )
            except APIStatusError as error:
                ends["refused" if is_clean(error) else repr(error)] += 1
            except APIConnectionError:  # nobody listens
                ends["gone"] += 1
                return ends
            else:
                assert answer.usage
                assert answer.usage.completion_tokens == 20
                ends["refused, then served" if ends["refused"] else "served"] += 1
            await asyncio.sleep(0.01)
    return ends


async def num_tokens_while_draining(client: httpx.AsyncClient, server: RunningServer) -> int:
    """The number of tokens of a stream that ends without an error; 0 if it is refused, or finds no server."""
    asked = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True}
    asked |= {"stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as reply:
            assert (await client.get(f"{server.url}/health/ready")).json()["state"] == "draining"
            text = (await reply.aread()).decode()
    except httpx.ConnectError:
        return 0
    if reply.status_code != 200:
        return 0
    *chunks, done = text.removeprefix("data: ").removesuffix("\n\n").split("\n\ndata: ")
    assert done == "[DONE]"
    assert '"error"' not in text
    return int(json.loads(chunks[-1])["usage"]["completion_tokens"])


async def test_with_a_drain_delay_who_comes_is_served_although_probes_say_no(
    deep_model: Path,
    tmp_path: Path,
) -> None:
    options = ("--drain-delay", str(DELAY_S), "--health-port", "0")
    with running_server(tmp_path, str(deep_model), *options) as server:
        (probes,) = re.findall(r"probes are answered at (\S+) too", server.text())
        is_gone = asyncio.Event()
        clients = [asyncio.create_task(ask_on(server, is_gone)) for _ in range(2)]
        long = asyncio.create_task(stream(server, 480))
        await server.until_in_flight(2, *clients)
        server.send(signal.SIGTERM)
        told_s = time.monotonic()
        async with httpx.AsyncClient() as client:
            while (await client.get(f"{probes}/health/ready")).status_code == 200:
                assert time.monotonic() - told_s < 30
            assert (await client.get(f"{probes}/health/live")).status_code == 200
            num_tokens = await num_tokens_while_draining(client, server)
            is_late = time.monotonic() - told_s > DELAY_S
            assert num_tokens == 480 or (is_late and not num_tokens), "still, unless the machine is slow"
        assert await asyncio.to_thread(server.wait) == 0
        is_gone.set()
        assert await long == 480
        for ends in await asyncio.gather(*clients):
            assert ends["served"] >= 1
            assert ends.keys() <= {"served", "refused", "gone"}
        assert time.monotonic() - told_s > DELAY_S


async def test_a_second_signal_ends_everything_at_once_the_delay_too(
    deep_model: Path, tmp_path: Path
) -> None:
    with running_server(tmp_path, str(deep_model), "--drain-delay", "30") as server:
        streams = [asyncio.create_task(stream(server, 480)) for _ in range(8)]
        await server.until_in_flight(8, *streams)
        server.send(signal.SIGINT)
        await asyncio.sleep(0.1)
        insisted_s = time.monotonic()
        server.send(signal.SIGINT)
        assert await asyncio.to_thread(server.wait) == 0
        assert time.monotonic() - insisted_s < 20
        ends = await asyncio.gather(*streams, return_exceptions=True)
        assert any(end != 480 for end in ends), "they were finished"
