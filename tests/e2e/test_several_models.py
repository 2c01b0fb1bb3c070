"""Chat, completions and embeddings of four models at one address; the fourth cannot be loaded."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.serving import RunningServer, running_server, wait_for
from tests.pooling_checkpoints import make_embedder, write_pooling_files

pytestmark = pytest.mark.night

ONE_THREAD = ("--num-threads", "1")
PROMPTS = ["Once upon a time", "The train", "A yard of", "In the morning"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_embedder("bert", tmp_path_factory.mktemp("models") / "encoder")
    write_pooling_files(folder, "mean")
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder without one of its weights, which is noticed only when it is loaded."""
    folder = make_embedder("bert", tmp_path_factory.mktemp("models") / "broken")
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    del tensors[next(name for name in tensors if "layer.0" in name)]
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, encoder: Path, broken: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("several")
    file = folder / "models.yaml"
    file.write_text(
        f"""
        models:
          - served_model_name: [demo, "claude-*"]
          - {{model: {broken}, served_model_name: broken}}
          - {{model: {tiny_model}, served_model_name: tiny}}
          - {{model: {encoder}, served_model_name: vectors}}
        """
    )
    options = ("--models", str(file), "--enable-admin", *ONE_THREAD)
    with running_server(folder, *options, ready_within_s=120) as server:
        yield server


async def continued(server: RunningServer, model: str) -> list[str]:
    """Texts of all prompts, asked for at once."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        bodies = [{"model": model, "prompt": each, "max_tokens": 24, "temperature": 0} for each in PROMPTS]
        replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    return [reply.json()["choices"][0]["text"] for reply in replies]


async def test_two_models_answer_at_once_each_with_the_tokens_that_it_gives_alone(
    server: RunningServer, demo_server: RunningServer
) -> None:
    both = await asyncio.gather(continued(server, "demo"), continued(server, "tiny"))
    assert both[0] == await continued(demo_server, "tokenyard-demo")
    assert both[1] == await continued(server, "tiny") != both[0]


def test_embeddings_are_made_beside_texts_and_a_name_by_pattern_is_the_model_that_has_it(
    server: RunningServer,
) -> None:
    body = {"model": "vectors", "input": ["a", "b"]}
    made = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()
    assert [len(each["embedding"]) for each in made["data"]] == [64, 64]
    wrong = httpx.post(f"{server.url}/v1/embeddings", json={**body, "model": "tiny"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "wrong_task")
    chat = {"model": "claude-9", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    assert httpx.post(f"{server.url}/v1/messages", json=chat, timeout=60).json()["model"] == "demo"


def test_a_model_that_cannot_be_loaded_is_given_up_by_itself(server: RunningServer) -> None:
    health = httpx.get(f"{server.url}/health/ready")
    assert (health.status_code, "broken: given up" in health.json()["detail"]) == (200, True)
    assert "broken is given up" in server.text()
    refused = httpx.post(f"{server.url}/v1/embeddings", json={"model": "broken", "input": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["demo", "tiny", "vectors"]


def test_metrics_and_the_memory_plan_are_by_model(server: RunningServer) -> None:
    ready = {name: value for name, value in server.metrics().items() if name.startswith("tokenyard:ready{")}
    assert ready == {
        'tokenyard:ready{model_name="demo"}': 1,
        'tokenyard:ready{model_name="broken"}': 0,
        'tokenyard:ready{model_name="tiny"}': 1,
        'tokenyard:ready{model_name="vectors"}': 1,
    }
    assert server.metric("process_open_fds") > 0
    for name in ("demo", "tiny", "vectors", "broken"):
        assert f"memory: {name} on cpu: " in server.text()


async def test_the_death_of_one_models_engine_ends_no_stream_of_another(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            assert server.engine_pid is not None  # of the first model
            os.kill(server.engine_pid, signal.SIGKILL)
            rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert all('"error"' not in line for line in rest)
    wait_for(lambda: httpx.get(f"{server.url}/health/ready").status_code == 200)
    assert (await continued(server, "demo"))[0]


def test_the_end_is_orderly_for_all_models(server: RunningServer) -> None:
    server.send(signal.SIGTERM)
    assert server.wait(60) == 0
