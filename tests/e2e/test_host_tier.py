"""A prompt that the device's cache had to give up, asked for again over HTTP."""

import httpx
import pytest

from tests.e2e.serving import RunningServer, wait_for

pytestmark = pytest.mark.night

PROMPT = [(7 * index + 5) % 90 + 10 for index in range(41)]  # five blocks of eight, and one token
STRANGER = [(11 * index + 3) % 90 + 10 for index in range(180)]  # 23 of the 24 blocks


def test_what_the_device_gave_up_is_found_on_the_host(swapping_server: RunningServer) -> None:
    with httpx.Client(base_url=swapping_server.url, timeout=60) as client:

        def complete(prompt: list[int], max_tokens: int) -> tuple[str, int]:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            reply = client.post("/v1/completions", json=body).raise_for_status().json()
            return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert client.post("/admin/reset_prefix_cache").status_code == 204
        before = swapping_server.metric("tokenyard:prefix_cache_host_hits_total")
        text, num_cached = complete(PROMPT, 20)
        assert num_cached == 0
        complete(STRANGER, 1)
        assert complete(PROMPT, 20) == (text, 40)
    swapping_server.wait_until_idle()
    hits = "tokenyard:prefix_cache_host_hits_total"
    wait_for(lambda: swapping_server.metric(hits) - before >= 24)
    assert swapping_server.metric("tokenyard:prefix_cache_host_stores_total") > 0
