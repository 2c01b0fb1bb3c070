"""The contract with endpoint pickers, on a real server under load: names, labels, ranges, freshness.

Source: llm-d's core-metrics-extractor, which reads four specifications per engine; the Gateway API inference
extension's proposals 003 and 004.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import RunningServer, running_server

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "deploy" / "kubernetes" / "overlays" / "gateway" / "endpoint-picker-config.yaml"
NUM_BLOCKS, BLOCK_SIZE = 24, 8


def specifications() -> dict[str, dict[str, str]]:
    """Metric names by engine: ours as we configure it, and the one that a picker assumes by default."""
    plugins = yaml.safe_load(CONFIG.read_text())["plugins"]
    (extractor,) = [plugin for plugin in plugins if plugin["type"] == "core-metrics-extractor"]
    (ours,) = extractor["parameters"]["engineConfigs"]
    assumed = {key: str(value).replace("tokenyard:", "vllm:") for key, value in ours.items()}
    return {"tokenyard": ours, "vllm": assumed}


@dataclass(frozen=True)
class Load:
    """Facts that a picker learns from one scrape."""

    queued: float
    running: float
    kv_usage: float
    block_size: int
    num_blocks: int


def extract(page: str, specification: dict[str, str]) -> Load:
    """Read as a picker does: one gauge for each, cache facts from labels."""
    families = {family.name: family for family in text_string_to_metric_families(page)}

    def gauge(key: str) -> float:
        family = families[specification[key]]
        assert family.type == "gauge"
        (sample,) = family.samples
        assert sample.name == family.name
        assert sample.labels.keys() == {"model_name", "engine"}
        return sample.value

    (cache,) = families[specification["cacheInfoSpec"]].samples
    assert cache.value == 1
    return Load(
        queued=gauge("queuedRequestsSpec"),
        running=gauge("runningRequestsSpec"),
        kv_usage=gauge("kvUsageSpec"),
        block_size=int(cache.labels["block_size"]),
        num_blocks=int(cache.labels["num_gpu_blocks"]),
    )


@pytest.fixture(scope="module")
def server(deep_model: Path, tmp_path_factory: pytest.TempPathFactory):
    options = (
        "--num-gpu-blocks-override",
        str(NUM_BLOCKS),
        "--block-size",
        str(BLOCK_SIZE),
        "--max-num-seqs",
        "4",
    )
    with running_server(tmp_path_factory.mktemp("picked"), str(deep_model), *options) as server:
        yield server


@contextlib.asynccontextmanager
async def crowd(server: RunningServer, num: int) -> AsyncIterator[None]:
    """Keep `num` requests in flight inside the `with`; at its end their clients hang up."""
    body = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(num)]
        try:
            await server.until_in_flight(num, *tasks)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("engine", ["tokenyard", "vllm"])
async def test_a_picker_learns_the_load_from_one_scrape(server: RunningServer, engine: str) -> None:
    specification = specifications()[engine]
    server.wait_until_idle()
    async with crowd(server, 12), httpx.AsyncClient() as client:
        load = extract((await client.get(f"{server.url}/metrics")).text, specification)
        assert load.running <= 4
        assert load.running + load.queued == 12, "although the first step may be to come"
        while not load.running:
            load = extract((await client.get(f"{server.url}/metrics")).text, specification)
    assert 0 < load.kv_usage <= 1
    assert (load.block_size, load.num_blocks) == (BLOCK_SIZE, NUM_BLOCKS)


async def test_what_a_picker_reads_is_never_a_second_old(server: RunningServer) -> None:
    specification = specifications()["tokenyard"]
    server.wait_until_idle()
    async with crowd(server, 8):
        pass
    async with httpx.AsyncClient() as client:
        left_s = time.monotonic()
        while True:
            load = extract((await client.get(f"{server.url}/metrics")).text, specification)
            if load.queued == load.running == load.kv_usage == 0:
                break
            assert time.monotonic() - left_s < 5, "one, and what a busy machine adds"
            await asyncio.sleep(0.05)


async def test_those_who_left_are_counted_as_such(server: RunningServer) -> None:
    before = server.metrics()['tokenyard:request_aborts_total{cause="client_left"}']
    async with crowd(server, 5):
        pass
    server.wait_until_idle()
    counts = {
        key: value for key, value in server.metrics().items() if key.startswith("tokenyard:request_aborts")
    }
    assert counts == {
        'tokenyard:request_aborts_total{cause="client_left"}': before + 5,
        'tokenyard:request_aborts_total{cause="shutdown"}': 0,
        'tokenyard:request_aborts_total{cause="engine_died"}': 0,
    }


async def test_a_scrape_stays_small_and_quick_under_the_load_of_a_picker(server: RunningServer) -> None:
    async with httpx.AsyncClient() as client:
        pages = [(await client.get(f"{server.url}/metrics")).text for _ in range(20)]
        started_s = time.perf_counter()
        for _ in range(20):
            await client.get(f"{server.url}/metrics")
        mean_s = (time.perf_counter() - started_s) / 20
    assert pages[-1].count("\n") < 700  # under both names
    assert mean_s < 0.05  # measured 0.002; a busy machine may pass
