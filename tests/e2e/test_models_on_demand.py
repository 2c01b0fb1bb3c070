"""Models that come when they are asked for: two of which one fits, and a third that leaves by itself."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from engine.processes.child_process import CONFIG_FILE
from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint
from tests.e2e.serving import RunningServer, content_of, running_server, wait_for
from tests.pooling_checkpoints import make_embedder, write_pooling_files
from worker.machine import available_memory_bytes

pytestmark = pytest.mark.night

BLOCK_BYTES = 32 * 2 * 2 * 2 * 16 * 4
"""Bytes of 32 tokens: keys and values of 2 layers with 2 heads of 16 numbers of 4 bytes."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("demand")
    models = [make_checkpoint("llama", folder / name) for name in ("first", "second")]
    vectors = make_embedder("bert", folder / "vectors")
    write_pooling_files(vectors, "mean")
    write_adapter(folder / "law", models[1], alpha=40)
    torn = make_embedder("bert", folder / "torn")
    write_pooling_files(torn, "mean")
    leave_out_weights(torn)
    broken = make_checkpoint("llama", folder / "broken")
    (broken / "tokenizer.json").write_text("{")
    # Pages of a cache that no token has touched take no memory: each has four tenths of seven.
    num_blocks = int(available_memory_bytes() * 0.4) // BLOCK_BYTES
    (folder / "models.yaml").write_text(
        f"""
        defaults: {{load: demand, num_threads: 1}}
        models:
          - {{model: {models[0]}, num_gpu_blocks_override: {num_blocks}, load: start}}
          - {{model: {models[1]}, num_gpu_blocks_override: {num_blocks}, lora_modules: [law={folder}/law]}}
          - {{of: first, served_model_name: calm, override_generation_config: {{temperature: 0}}}}
          - {{model: {vectors}, keep_alive: 1s}}
          - {{model: {torn}}}
          - {{model: {broken}}}
          - {{model: {folder}/gone}}
        """
    )
    options = ("--models", str(folder / "models.yaml"), "--state-folder", str(folder / "state"))
    with running_server(folder, *options, ready_within_s=120) as server:
        yield server


def leave_out_weights(folder: Path) -> None:
    """Leave out what is missed only when the model is loaded."""
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    save_file(
        {name: each for name, each in tensors.items() if "layer.0" not in name},
        weights,
        metadata={"format": "pt"},
    )


def pid_of(server: RunningServer, model: str) -> int | None:
    """Process id of the engine of a model, loaded or not."""
    for path in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in map(int, content_of(path).split()):
            words = content_of(Path(f"/proc/{pid}/cmdline")).decode().split("\0")
            if "engine.core.process" in words:
                config = Path(words[words.index("engine.core.process") + 1], CONFIG_FILE)
                if f"/{model}".encode() in content_of(config):
                    return pid
    return None


def states(server: RunningServer) -> dict[str, str]:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    return {each["id"]: each["status"]["value"] for each in listed}


async def ask(client: httpx.AsyncClient, model: str, max_tokens: int) -> str:
    body = {"model": model, "prompt": "a", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


async def test_models_take_turns_no_request_is_lost_and_none_is_cut(server: RunningServer) -> None:
    named = states(server)
    assert named.pop("broken") == named.pop("gone") == "failed"
    assert named.pop("first") == named.pop("calm") == "loaded"
    assert set(named.values()) == {"unloaded"}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        running = asyncio.create_task(ask(client, "first", 300))
        await server.until_in_flight(1, running)
        texts = await asyncio.gather(*(ask(client, "second", 8) for _ in range(3)))
        assert len(await running) > 0
        assert len(set(texts)) == 1
        assert {states(server)[name] for name in ("first", "second")} == {"unloaded", "loaded"}
    page = httpx.get(f"{server.url}/metrics").text
    assert 'tokenyard:model_loads_total{model_name="second",result="loaded"}' in page
    assert 'tokenyard:model_unloads_total{model_name="first",reason="evicted"}' in page


async def test_requests_wait_through_the_death_of_the_process_that_loads_their_model(
    server: RunningServer,
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        text = await ask(client, "second", 8)
        assert await ask(client, "first", 8) == await ask(client, "first", 8)
        waiting = [asyncio.create_task(ask(client, "second", 8)) for _ in range(3)]
        while (pid := pid_of(server, "second")) is None:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*waiting) == [text] * 3
        assert pid_of(server, "second") not in (pid, None)


async def test_a_request_for_an_adapter_or_a_profile_brings_the_model_below_it(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        assert states(server)["calm"] == "unloaded"
        body = {"model": "calm", "prompt": "a", "max_tokens": 8, "ignore_eos": True}
        reply = (await client.post("/v1/completions", json=body)).json()
        assert (reply["model"], reply["choices"][0]["text"]) == ("calm", await ask(client, "first", 8))
        assert states(server)["law"] == "unloaded"
        adapted = await ask(client, "law", 8)
        assert states(server)["law"] == states(server)["second"] == "loaded"
        assert adapted == await ask(client, "law", 8) != await ask(client, "second", 8)


async def test_loads_and_unloads_by_hand_cut_no_request_and_leave_none_waiting(server: RunningServer) -> None:
    chance = random.Random(3)
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        expected = {name: await ask(client, name, 24) for name in ("first", "second")}
        asked = []
        for _ in range(10):
            name = chance.choice(["first", "second"])
            asked.append((name, asyncio.create_task(ask(client, name, 24))))
            path, body = chance.choice(
                [
                    ("/models/unload", {"model": name}),
                    ("/models/load", {"model": name}),
                    ("/api/generate", {"model": name, "keep_alive": 0}),
                ]
            )
            acted = await client.post(path, json=body)
            assert acted.status_code == 200, acted.text
            await asyncio.sleep(chance.random())
        for name, request in asked:
            assert await request == expected[name]


async def test_a_line_of_a_batch_waits_behind_clients_and_is_answered_with_theirs(
    server: RunningServer,
) -> None:
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": name, "prompt": "a", "max_tokens": 4},
        }
        for name in ("first", "second", "gone")
    ]
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await ask(client, "first", 4)
        content = "\n".join(map(json.dumps, lines)).encode()
        file = await client.post("/v1/files", files={"file": content}, data={"purpose": "batch"})
        body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=body)).json()
        while not server.metric("tokenyard:requests_waiting_for_model"):
            await asyncio.sleep(0.05)
        assert states(server)["first"] == "loaded", "it leaves for no line of a batch at once"
        await ask(client, "second", 4)
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.1)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}


async def test_a_model_that_cannot_be_loaded_is_tried_once_for_all_that_wait_and_not_again_at_once(
    server: RunningServer,
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        body = {"model": "torn", "input": "a"}
        for _ in range(2):
            replies = await asyncio.gather(*(client.post("/v1/embeddings", json=body) for _ in range(3)))
            assert {each.status_code for each in replies} == {503}
            assert int(replies[0].headers["retry-after"]) > 1
        assert states(server)["torn"] == "failed"
        assert len(await ask(client, "second", 4)) > 0
    assert server.text().count("torn is not loaded for 30 s") == 1


def test_a_model_that_is_idle_leaves_and_comes_back(server: RunningServer) -> None:
    for _ in range(2):
        body = {"model": "vectors", "input": "a"}
        made = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120)
        assert len(made.json()["data"][0]["embedding"]) == 64
        wait_for(lambda: states(server)["vectors"] == "unloaded")
    assert httpx.get(f"{server.url}/health/ready").status_code == 200


@pytest.mark.parametrize(("name", "why"), [("broken", "tokenizer.json"), ("gone", "there is no such folder")])
def test_broken_texts_and_a_missing_folder_are_told_to_their_own_requests(
    server: RunningServer, name: str, why: str
) -> None:
    body = {"model": name, "prompt": "a"}
    refused = httpx.post(f"{server.url}/v1/completions", json=body)
    assert (refused.status_code, why in refused.json()["error"]["message"]) == (503, True), refused.text
    assert httpx.post(f"{server.url}/tokenize", json=body).status_code == 503
    health = httpx.get(f"{server.url}/health", params={"model": name})
    assert (health.status_code, why in health.json()["detail"]) == (503, True)
    assert httpx.get(f"{server.url}/health").status_code == 200


async def test_the_end_during_a_load_is_orderly_and_refuses_those_that_wait_for_it(
    server: RunningServer,
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await ask(client, "first", 4)
        body = {"model": "second", "prompt": "a"}
        waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
        while pid_of(server, "second") is None:
            await asyncio.sleep(0.01)
        server.process.terminate()
        for each in await asyncio.gather(*waiting):
            assert (each.status_code, each.json()["error"]["code"]) == (503, "shutting_down")
    assert server.wait(60) == 0, server.text()[-3000:]
