"""Models that come when they are asked for: two of which one fits, and a third that leaves by itself."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.serving import RunningServer, running_server, wait_for
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
    broken = make_checkpoint("llama", folder / "broken")
    (broken / "tokenizer.json").write_text("{")
    # Pages of a cache that no token has touched take no memory: each has four tenths of seven.
    num_blocks = int(available_memory_bytes() * 0.4) // BLOCK_BYTES
    (folder / "models.yaml").write_text(
        f"""
        defaults: {{load: demand, num_threads: 1}}
        models:
          - {{model: {models[0]}, num_gpu_blocks_override: {num_blocks}, load: start}}
          - {{model: {models[1]}, num_gpu_blocks_override: {num_blocks}}}
          - {{model: {vectors}, keep_alive: 1s}}
          - {{model: {broken}}}
          - {{model: {folder}/gone}}
        """
    )
    with running_server(folder, "--models", str(folder / "models.yaml"), ready_within_s=120) as server:
        yield server


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
    assert named == {"first": "loaded", "second": "unloaded", "vectors": "unloaded"}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        running = asyncio.create_task(ask(client, "first", 300))
        await server.until_in_flight(1, running)
        texts = await asyncio.gather(*(ask(client, "second", 8) for _ in range(3)))
        assert len(await running) > 0
        assert len(set(texts)) == 1
        assert {states(server)[name] for name in ("first", "second")} == {"unloaded", "loaded"}
        assert await ask(client, "first", 8) == await ask(client, "first", 8)
        assert [await ask(client, "second", 8)] * 3 == texts
    assert server.text().count("second is loaded") == 2


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


def test_a_load_by_hand_is_counted(server: RunningServer) -> None:
    assert httpx.post(f"{server.url}/models/load", json={"model": "second"}).status_code == 200
    wait_for(lambda: states(server)["second"] == "loaded")
    page = httpx.get(f"{server.url}/metrics").text
    assert 'tokenyard:model_loads_total{model_name="second",result="loaded"}' in page
    assert 'tokenyard:model_unloads_total{model_name="first",reason="evicted"}' in page


def test_the_end_is_orderly(server: RunningServer) -> None:
    server.process.terminate()
    assert server.wait(60) == 0, server.text()[-3000:]
