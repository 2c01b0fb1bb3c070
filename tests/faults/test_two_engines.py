"""Two real engines behind one API process: both work, one dies, and the line before them loses nothing."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
import pytest_asyncio
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import DeadlineExceeded, EngineError
from engine.frontend.client import AsyncEngine
from engine.options.engine_config import resolve
from engine.options.sources import read_options
from engine.processes import engine_processes
from engine.types import GenerationRequest, ReportPage, SamplingParams, ServiceTerms, TimeLimits

pytestmark = [pytest.mark.night, pytest.mark.asyncio(loop_scope="module")]

WAIT_S = 90
SEATS = 4
NO_LIMITS = TimeLimits()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[AsyncEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_processes, "_FIRST_BACK_OFF_S", 0.01)
        given = {
            "model": str(tiny_model),
            "cpu_kernels": "off",
            "num_threads": "1",
            "max_num_seqs": str(SEATS),
        }
        config, _ = resolve(read_options({**given, "data_parallel_size": "2"}, {}), environment={})
        engine = AsyncEngine(config)
        engine.start()
        await both_ready(engine)
        yield engine
        pids = engine._engines.pids
        await engine.close()
    assert len(set(pids)) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def both_ready(engine: AsyncEngine) -> None:
    async with asyncio.timeout(WAIT_S):
        while engine.health().detail != "ready, 2 of 2 engines":
            await asyncio.sleep(0.02)


def request(
    name: str, *, max_tokens: int = 8, limits: TimeLimits = NO_LIMITS, n: int = 1
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=(5, 6, *name.encode()),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        terms=ServiceTerms(time_limits=limits),
        n=n,
    )


async def outcome(engine: AsyncEngine, asked: GenerationRequest) -> "list[int] | EngineError":
    tokens: list[int] = []
    try:
        async with asyncio.timeout(WAIT_S):
            async for _, output in engine.generate_all([asked]):
                tokens += output.token_ids
    except EngineError as error:
        return error
    return tokens


def samples(engine: AsyncEngine, name: str) -> dict[str, float]:
    """Values of a metric by the label `engine`."""
    engine.metrics.look()
    page = generate_latest(engine.metrics.registry).decode()
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


async def live(engine: AsyncEngine) -> list[tuple[int | None, str]]:
    reports, total = await engine.explain(ReportPage(0, 1000))
    assert total >= len(reports)
    assert orjson.dumps(reports), "as GET /admin/requests replies with them"
    return [(report["engine"], report["state"]) for report in reports]


async def test_requests_wait_in_one_line_and_run_on_both_engines(engine: AsyncEngine) -> None:
    before = samples(engine, "tokenyard:num_requests_running")
    assert before == {"0": 0, "1": 0}
    asked = [asyncio.create_task(outcome(engine, request(f"crowd {i}", max_tokens=300))) for i in range(30)]
    await asyncio.sleep(0)
    waiting = samples(engine, "vllm:num_requests_waiting")
    assert sum(waiting.values()) == 30, "a wave is in the next scrape"
    assert set(waiting) == {"0", "1"}
    async with asyncio.timeout(WAIT_S):
        while (found := await live(engine)).count((0, "running")) < 2 or found.count((1, "running")) < 2:
            await asyncio.sleep(0.01)
    assert (None, "waiting") in found, "the line is reported too"
    assert found.index((None, "waiting")) > max(found.index((0, "running")), found.index((1, "running")))
    hurried = await outcome(engine, request("hurried", limits=TimeLimits(queue_s=0.05)))
    assert isinstance(hurried, DeadlineExceeded)
    assert all(len(each) == 300 for each in await asyncio.gather(*asked))
    assert engine.load().num_waiting == 0
    (views := engine.watch())
    await asyncio.wait_for(anext(views), WAIT_S)
    await views.aclose()


async def test_the_choices_of_a_request_stay_together_and_share_the_cache(engine: AsyncEngine) -> None:
    long = GenerationRequest(
        request_id="long", prompt_token_ids=tuple(range(5, 69)) * 2, params=SamplingParams(max_tokens=4)
    )
    first = [output async for _, output in engine.generate_all([long])]
    again = [output async for _, output in engine.generate_all([long])]
    assert first[0].num_cached_tokens == 0
    assert again[0].num_cached_tokens >= 96, "the second one goes where the first one was"
    assert len(await outcome(engine, request("three", n=3))) == 24
    engine.reset_prefix_cache()
    fresh = [output async for _, output in engine.generate_all([long])]
    assert fresh[0].num_cached_tokens == 0


async def test_killing_one_of_two_under_load_costs_no_request_a_token(engine: AsyncEngine) -> None:
    alone = [await outcome(engine, request(f"r{i}", max_tokens=60)) for i in range(16)]
    asked = [asyncio.create_task(outcome(engine, request(f"r{i}", max_tokens=60))) for i in range(16)]
    async with asyncio.timeout(WAIT_S):
        while (await live(engine)).count((1, "running")) < SEATS:
            await asyncio.sleep(0.005)
    num_before = samples(engine, "tokenyard:engine_ready")
    victim = engine._engines.pids[1]
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    assert num_before == {"0": 1, "1": 1}
    assert await asyncio.gather(*asked) == alone, "the other one serves"
    await both_ready(engine)
    assert engine._engines.pids[1] != victim
    assert await outcome(engine, request("r0", max_tokens=60)) == alone[0]
