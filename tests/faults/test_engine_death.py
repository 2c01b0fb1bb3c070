"""The engine process dies or stands still while requests are in flight."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint
from tests.e2e.serving import RunningServer, running_server, wait_for

pytestmark = pytest.mark.night

FIRST_TOKENS = "tokenyard:time_to_first_token_seconds_count"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One for all deaths of its engine process."""
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, str(tiny_model), "--heartbeat-timeout", "3") as server:
        yield server
        pids = [server.process.pid, server.engine_pid]
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


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


async def test_kill_9_of_the_engine_costs_64_streams_a_pause_and_no_token(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        undisturbed = [await reply_of(client, kind) for kind in KINDS]
        kinds = [*KINDS, half_seen(undisturbed[0][0].text)]
        undisturbed.append(undisturbed[0])
        num_before = server.metric(FIRST_TOKENS)
        streams = [asyncio.create_task(reply_of(client, kind)) for kind in 8 * kinds]
        while server.metric(FIRST_TOKENS) < num_before + 8 * sum(kind.get("n", 1) for kind in kinds):
            assert not any(task.done() for task in streams), "they end too soon"
            await asyncio.sleep(0.02)
        first_pid = server.engine_pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        wait_for(lambda: not is_ready(server))
        check_refusal_while_dead(server)
        assert await asyncio.gather(*streams) == 8 * undisturbed
        assert server.engine_pid not in (None, first_pid)
    assert server.metrics()['tokenyard:engine_restarts_total{cause="crash"}'] == 1
    assert server.metric("tokenyard:requests_replayed_total") == len(streams) == 64
    server.wait_until_idle()
    assert "was killed by signal SIGKILL" in server.text()


NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
REPETITIVE = "one two three four one two three four one two three four"


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
async def test_drafts_adapters_and_states_survive_kill_9_too(family: str, tmp_path: Path) -> None:
    """Layers with states begin from none in the next process; drafts and adapters are the request's own."""
    model = make_checkpoint(family, tmp_path / family)
    words = ["--speculative-config", NGRAM]
    kinds = [{"temperature": 0, "prompt": REPETITIVE}, {"seed": 3, "temperature": 1.1, "prompt": "Thrice"}]
    if family == "llama":
        write_adapter(tmp_path / "poet", model, rank=4, seed=1)
        words += ["--lora-modules", f"poet={tmp_path / 'poet'}"]
        kinds += [{**kind, "model": "poet"} for kind in kinds]
    with running_server(tmp_path, str(model), *words) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            undisturbed = [await reply_of(client, kind) for kind in kinds]
            assert len({reply[0].text for reply in undisturbed}) == len(kinds), "each depends on its kind"
            num_before = server.metric(FIRST_TOKENS)
            streams = [asyncio.create_task(reply_of(client, kind)) for kind in 3 * kinds]
            while server.metric(FIRST_TOKENS) < num_before + len(streams):
                assert not any(task.done() for task in streams), "they end too soon"
                await asyncio.sleep(0.01)
            assert server.engine_pid is not None
            os.kill(server.engine_pid, signal.SIGKILL)
            assert await asyncio.gather(*streams) == 3 * undisturbed
        assert server.metric("tokenyard:requests_replayed_total") == len(streams)
        server.wait_until_idle()


def num_tokens_of_a_long_reply(server: RunningServer) -> int:
    body = {"prompt": "Once upon", "max_tokens": 480, "ignore_eos": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    return reply.json()["usage"]["completion_tokens"]


def test_an_engine_that_stands_still_is_reported_and_replaced_but_not_one_whose_server_stood_still_too(
    server: RunningServer,
) -> None:
    pid = server.engine_pid
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
    assert "has not moved" not in server.text(), "not even for a moment"

    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: httpx.get(f"{server.url}/health/live").status_code == 503)
    assert not is_ready(server)
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    # It is being cured from within, as soon as the server knows.
    wait_for(lambda: httpx.get(f"{server.url}/health/live").status_code == 200)
    wait_for(lambda: is_ready(server), within_s=60)
    assert server.metrics()['tokenyard:engine_restarts_total{cause="hang"}'] == 1
    assert "stood still for 3 s and was killed" in server.text()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(AssertionError, match="it did not start"), running_server(tmp_path, str(broken)):
        pass
    log = (tmp_path / "server.log").read_text()
    last = log.strip().splitlines()[-1]
    assert last.startswith("tokenyard: ")
    assert "Traceback" not in log
