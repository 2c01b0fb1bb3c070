"""Families with states, and without a paged KV cache, behind the whole server."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.serving import RunningServer, running_server

pytestmark = pytest.mark.night

NUM_TOKENS = 24


def prompt_of(index: int) -> list[int]:
    return [(7 * index + 3 * place) % 90 + 10 for place in range(20 + index)]


async def complete(client: httpx.AsyncClient, index: int, **fields: object) -> dict[str, object]:
    body = {"prompt": prompt_of(index), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    reply = await client.post("/v1/completions", json={**body, **fields})
    return reply.raise_for_status().json()


async def check_kill_9(server: RunningServer) -> None:
    """States begin from none in the next process, and the texts are the same."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        alone = await complete(client, 0, max_tokens=200)
        first = server.metric("tokenyard:time_to_first_token_seconds_count")
        begun = [asyncio.create_task(complete(client, 0, max_tokens=200)) for _ in range(2)]
        while server.metric("tokenyard:time_to_first_token_seconds_count") < first + 2:
            assert not any(each.done() for each in begun), "they end too soon"
            await asyncio.sleep(0.01)
        assert server.engine_pid is not None
        os.kill(server.engine_pid, signal.SIGKILL)
        assert [each["choices"] for each in await asyncio.gather(*begun)] == [alone["choices"]] * 2
    assert server.metric("tokenyard:requests_replayed_total") == 2


@pytest.mark.parametrize(
    ("family", "num_blocks", "swap"), [("qwen3_next", 40, ("--swap-space", "16MiB")), ("bloom", 20, ())]
)
async def test_a_crowd_that_preempts_itself_gets_the_same_texts_as_each_alone(
    tmp_path: Path, family: str, num_blocks: int, swap: tuple[str, ...]
) -> None:
    model = make_checkpoint(family, tmp_path / family)
    options = (
        "--num-gpu-blocks-override",
        str(num_blocks),
        "--block-size",
        "8",
        "--max-num-seqs",
        "8",
        *swap,
    )
    chunks = ("--max-num-batched-tokens", "16")
    with running_server(tmp_path, str(model), *options, *chunks) as server:
        is_alone = "transformers alone computes, one sequence after the other" in server.text()
        assert is_alone is (family == "bloom")
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            alone = [await complete(client, index) for index in range(6)]
            crowd = await asyncio.gather(*(complete(client, index) for index in range(6)))
            for each, other in zip(alone, crowd, strict=True):
                assert each["choices"] == other["choices"]
                assert each["usage"]["completion_tokens"] == NUM_TOKENS
            scored = await complete(client, 3, max_tokens=0, echo=True, logprobs=2)
            assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(prompt_of(3))
            again = [await complete(client, index) for index in range(6)]
            assert [each["choices"] for each in again] == [each["choices"] for each in alone]
        assert server.metric("tokenyard:num_preemptions_total") > 0
        # Without the host's memory a crowd of few blocks leaves no state to be found.
        assert (server.metric("tokenyard:prefix_cache_hits_total") > 0) >= bool(swap)
        server.wait_until_idle()
        if family == "qwen3_next":
            await check_kill_9(server)
