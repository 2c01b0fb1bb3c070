"""The engine process dies or stands still while requests are in flight."""

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import RunningServer, wait_for

pytestmark = pytest.mark.night

FIRST_TOKENS = "tokenyard:time_to_first_token_seconds_count"


def is_ready(server: RunningServer) -> bool:
    return httpx.get(f"{server.url}/health/ready").status_code == 200


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 5, "temperature": 1.2, "top_p": 0.9, "logprobs": 2},
    {"seed": 6, "frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"7": 2}},
    {"seed": 7, "n": 3},
    {"seed": 8, "echo": True, "logprobs": 1},
    {"seed": 9, "ignore_eos": False, "structured_outputs": {"regex": "([a-f]{3} ){150}"}},
    {"seed": 10, "stop": ["xyzzy", "plugh!"]},
)
"""Requests whose tokens depend on more than the tokens before."""
REPETITIVE = "one two three four one two three four one two three four"
WITH_AN_ADAPTER = (
    {"model": "poet", "temperature": 0, "prompt": REPETITIVE},
    {"model": "poet", "seed": 3, "temperature": 1.1, "prompt": "Thrice"},
)
NUM_STREAMS = 64


@dataclass
class Choice:
    """One continuation, as it was streamed."""

    text: str = ""
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None


async def reply_of(client: httpx.AsyncClient, kind: dict[str, Any]) -> list[Choice]:
    """Read a long reply as a stream."""
    body = {"prompt": "Once upon", "max_tokens": 400, "ignore_eos": True, "stream": True} | kind
    choices = [Choice() for _ in range(kind.get("n", 1))]
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        lines = [line async for line in reply.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    for line in lines[:-1]:
        (part,) = json.loads(line.removeprefix("data: "))["choices"]
        choice = choices[part["index"]]
        choice.text += part["text"]
        choice.logprobs += (part["logprobs"] or {}).get("token_logprobs", [])
        choice.finish_reason = part["finish_reason"] or choice.finish_reason
    return choices


def check_refusal_while_dead(server: RunningServer) -> None:
    ready = httpx.get(f"{server.url}/health/ready")
    assert ready.status_code == 503
    assert "SIGKILL" in ready.json()["detail"]
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


def half_seen(text: str) -> dict[str, Any]:
    """Request for the reply with this text, in which at any time one string to stop at is seen in part."""
    length = len(text) // 4
    return {
        "temperature": 0,
        "stop": [f"{text[at : at + length]}\0xyzzy" for at in range(0, 4 * length, length)],
    }


async def test_kill_9_of_the_engine_costs_64_streams_a_pause_and_no_token(
    mortal_server: RunningServer,
) -> None:
    """Nor of an adapter that was loaded later, or of drafts."""
    server, crashes = mortal_server, 'tokenyard:engine_restarts_total{cause="crash"}'
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        poet = {"lora_name": "poet", "lora_path": "poet"}
        assert (await client.post("/v1/load_lora_adapter", json=poet)).status_code == 200
        kinds = [*KINDS, *WITH_AN_ADAPTER]
        undisturbed = [await reply_of(client, kind) for kind in kinds]
        assert undisturbed[-2][0].text != (await reply_of(client, kinds[-2] | {"model": "tiny"}))[0].text
        kinds.append(half_seen(undisturbed[0][0].text))
        undisturbed.append(undisturbed[0])
        begun = (7 * kinds)[:NUM_STREAMS]
        num_before, num_crashes = server.metric(FIRST_TOKENS), server.metrics().get(crashes, 0)
        num_replayed = server.metric("tokenyard:requests_replayed_total")
        streams = [asyncio.create_task(reply_of(client, kind)) for kind in begun]
        while server.metric(FIRST_TOKENS) < num_before + sum(kind.get("n", 1) for kind in begun):
            assert not any(task.done() for task in streams), "they end too soon"
            await asyncio.sleep(0.02)
        first_pid = server.engine_pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        wait_for(lambda: not is_ready(server))
        check_refusal_while_dead(server)
        assert await asyncio.gather(*streams) == (7 * undisturbed)[:NUM_STREAMS]
        assert server.engine_pid not in (None, first_pid)
    assert server.metrics()[crashes] == num_crashes + 1
    assert server.metric("tokenyard:requests_replayed_total") == num_replayed + NUM_STREAMS
    assert server.metric("tokenyard:draft_tokens_total") > 0
    server.wait_until_idle()
    assert "was killed by signal SIGKILL" in server.text()


def num_tokens_of_a_long_reply(server: RunningServer) -> int:
    body = {"prompt": "Once upon", "max_tokens": 480, "ignore_eos": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    return reply.json()["usage"]["completion_tokens"]


def test_an_engine_that_stands_still_is_reported_and_replaced_but_not_one_whose_server_stood_still_too(
    mortal_server: RunningServer,
) -> None:
    server, pid = mortal_server, mortal_server.engine_pid
    hangs, before = 'tokenyard:engine_restarts_total{cause="hang"}', len(mortal_server.text())
    num_hangs = server.metrics().get(hangs, 0)
    assert pid is not None
    with ThreadPoolExecutor(8) as clients:
        under_way = [clients.submit(num_tokens_of_a_long_reply, server) for _ in range(8)]
        wait_for(lambda: server.metric("tokenyard:num_requests_running") == 8)
        for each in (server.process.pid, pid):  # as when a container is frozen
            os.kill(each, signal.SIGSTOP)
        time.sleep(4)
        assert not any(each.done() for each in under_way)
        os.kill(server.process.pid, signal.SIGCONT)
        time.sleep(0.3)  # the engine is a little later
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: is_ready(server))
        assert [each.result(60) for each in under_way] == [480] * 8, "nobody has lost anything"
    assert server.engine_pid == pid
    assert "has not moved" not in server.text()[before:], "not even for a moment"

    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: httpx.get(f"{server.url}/health/live").status_code == 503)
    assert not is_ready(server)
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    # It is being cured from within, as soon as the server knows.
    wait_for(lambda: httpx.get(f"{server.url}/health/live").status_code == 200)
    wait_for(lambda: is_ready(server), within_s=60)
    assert server.metrics()[hangs] == num_hangs + 1
    assert "stood still for 3 s and was killed" in server.text()
