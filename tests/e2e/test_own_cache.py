"""Families with states, and without a paged KV cache, behind the whole server."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.serving import running_server

pytestmark = pytest.mark.night

NUM_TOKENS = 24


def prompt_of(index: int) -> list[int]:
    return [(7 * index + 3 * place) % 90 + 10 for place in range(20 + index)]


async def complete(client: httpx.AsyncClient, index: int, **fields: object) -> dict[str, object]:
    body = {"prompt": prompt_of(index), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    reply = await client.post("/v1/completions", json={**body, **fields})
    return reply.raise_for_status().json()


@pytest.mark.parametrize(
    ("family", "num_blocks", "swap"),
    [("qwen3_next", 40, ()), ("qwen3_next", 40, ("--swap-space", "16MiB")), ("bloom", 20, ())],
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
        # Without the host's memory a crowd of forty blocks leaves no state to be found.
        assert (server.metric("tokenyard:prefix_cache_hits_total") > 0) >= bool(swap)
        server.wait_until_idle()
