"""Many clients at once against a KV cache that is too small for them."""

import asyncio
import random

import httpx
import pytest
from openai import AsyncOpenAI

from tests.e2e.serving import RunningServer

pytestmark = pytest.mark.night

NUM_CLIENTS = 64
MAX_TOKENS = 40


def client_of(server: RunningServer) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


async def stream_text(client: AsyncOpenAI, prompt: str) -> tuple[str, str]:
    """The text and the finish reason."""
    pieces, reasons = [], []
    stream = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    async for chunk in stream:
        for choice in chunk.choices:
            pieces.append(choice.text)
            reasons.append(choice.finish_reason)
    (reason,) = [reason for reason in reasons if reason is not None]
    return "".join(pieces), reason


async def test_64_streams_that_do_not_fit_all_get_the_text_they_get_alone(
    crowded_server: RunningServer,
) -> None:
    prompts = [f"Once upon a time {i} trains " + "and more " * (i % 7) for i in range(NUM_CLIENTS)]
    async with client_of(crowded_server) as client:
        before = crowded_server.metric("tokenyard:num_preemptions_total")
        together = await asyncio.gather(*(stream_text(client, prompt) for prompt in prompts))
        preemptions = crowded_server.metric("tokenyard:num_preemptions_total") - before
        alone = [await stream_text(client, prompt) for prompt in prompts]
    assert together == alone
    assert preemptions > 0, "the cache was large enough: make it smaller"
    crowded_server.wait_until_idle()
    assert crowded_server.metric("tokenyard:recomputed_tokens_total") > 0


@pytest.mark.night
async def test_swapped_out_and_in_the_text_is_the_same_and_the_swap_space_is_empty_at_the_end(
    swapping_server: RunningServer,
) -> None:
    prompts = [f"Once upon a time {i} trains " + "and more " * (i % 7) for i in range(NUM_CLIENTS)]
    async with client_of(swapping_server) as client:
        together = await asyncio.gather(*(stream_text(client, prompt) for prompt in prompts))
        alone = [await stream_text(client, prompt) for prompt in prompts]
    assert together == alone
    swapped = 'tokenyard:num_preemptions_total{cause="growth",mode="swap"}'
    assert swapping_server.metrics()[swapped] > 0
    assert swapping_server.metric("tokenyard:swap_space_full_total") > 0, "make the swap space smaller"
    swapping_server.wait_until_idle()


async def test_200_clients_that_hang_up_at_random_moments_leave_nothing(
    crowded_server: RunningServer,
) -> None:
    dice = random.Random(1)

    async def hang_up(number: int) -> None:
        body = {
            "prompt": f"hello {number}",
            "max_tokens": 150,
            "stream": number % 3 != 0,
            "n": 1 + number % 2,
        }
        timeout = httpx.Timeout(10, read=dice.uniform(0.001, 1.5))
        async with httpx.AsyncClient(timeout=timeout) as client:
            try:
                async with asyncio.timeout(dice.uniform(0.01, 2.0)):
                    await client.post(f"{crowded_server.url}/v1/completions", json=body)
            except (TimeoutError, httpx.HTTPError):
                pass

    async def leave_under_way() -> None:
        body = {"prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{crowded_server.url}/v1/completions", json=body) as reply,
        ):
            async for _ in reply.aiter_raw():
                break

    # On a slow machine none of the first have an answer before they leave.
    await asyncio.gather(*(hang_up(number) for number in range(195)), *(leave_under_way() for _ in range(5)))
    crowded_server.wait_until_idle()
    assert crowded_server.metrics()['tokenyard:request_success_total{finished_reason="abort"}'] > 0


async def test_n_choices_of_a_seeded_request_differ_and_come_again(crowded_server: RunningServer) -> None:
    async with client_of(crowded_server) as client:

        async def ask() -> list[str]:
            answer = await client.completions.create(
                model="tiny", prompt="Once", max_tokens=12, n=4, seed=7, temperature=1.5
            )
            assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
            return [choice.text for choice in answer.choices]

        first = await ask()
        assert first == await ask()
        assert len(set(first)) > 1
