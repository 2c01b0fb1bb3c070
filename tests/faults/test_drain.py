"""How a server leaves: accepted requests are finished, unless somebody insists."""

import asyncio
import signal
import time
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from tests.e2e.serving import RunningServer, running_server


async def stream(server: RunningServer, max_tokens: int) -> int:
    """The number of tokens of a whole stream."""
    num_tokens = 0
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(
            model="tiny",
            prompt="Once",
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in answer:
            if chunk.usage:
                num_tokens = chunk.usage.completion_tokens
    return num_tokens


async def test_sigterm_finishes_accepted_streams_refuses_new_ones_and_exits_0(
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    with running_server(tmp_path, str(tiny_model)) as server:
        accepted = [asyncio.create_task(stream(server, 400)) for _ in range(8)]
        await server.until_in_flight(8, *accepted)
        server.send(signal.SIGTERM)
        await asyncio.sleep(0.1)
        async with httpx.AsyncClient() as client:
            ready = await client.get(f"{server.url}/health/ready")
            refused = await client.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert ready.status_code == 503
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        # A kept connection, through a proxy that only moves bytes, would lead the retry here again.
        assert refused.headers["connection"] == "close"
        assert await asyncio.gather(*accepted) == [400] * 8
        assert await asyncio.to_thread(server.wait) == 0


async def test_what_does_not_finish_in_time_is_cut_off_with_an_error(
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    options = ("--shutdown-timeout", "0.2", "--max-num-batched-tokens", "64", "--max-num-seqs", "64")
    with running_server(tmp_path, str(tiny_model), *options) as server:
        streams = [asyncio.create_task(stream(server, 480)) for _ in range(32)]
        await server.until_in_flight(8, *streams)
        server.send(signal.SIGTERM)
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert any("shutting down" in str(result) for result in results)
        assert await asyncio.to_thread(server.wait) == 0


async def test_a_second_signal_ends_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, str(tiny_model)) as server:
        streams = [asyncio.create_task(stream(server, 480)) for _ in range(32)]
        await server.until_in_flight(8, *streams)
        server.send(signal.SIGINT)
        await asyncio.sleep(0.1)
        insisted_s = time.monotonic()
        server.send(signal.SIGINT)
        await asyncio.to_thread(server.wait)
        assert time.monotonic() - insisted_s < 4
        await asyncio.gather(*streams, return_exceptions=True)
