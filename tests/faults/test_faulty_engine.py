"""Fate of requests, and of those beside them, when the engine process meets a fault."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.errors import DeadlineExceeded, EngineDiedTwice, EngineError, RequestFailed
from engine.frontend.client import AsyncEngine
from engine.options.engine_config import resolve
from engine.options.sources import read_options
from engine.processes import engine_processes as lives
from engine.processes import supervisor
from engine.processes.engine_processes import DeathCause
from engine.types import GenerationRequest, SamplingParams, ServiceTerms, TimeLimits
from tests.faults.faulty_engine import Fault

pytestmark = [pytest.mark.night, pytest.mark.asyncio(loop_scope="module")]

WAIT_S = 60
NO_LIMITS = TimeLimits()
HEARTBEAT_TIMEOUT_S = 3.0
SEATS = 2


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of the processes on stderr."""
    return tmp_path_factory.mktemp("log") / "engine.log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tiny_model: Path, log: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncEngine]:
    """One for all tests, whatever they do to its process; afterwards nothing of it is left."""
    runtime = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            supervisor,
            "_child_arguments",
            lambda directory: [
                *("-m", "tests.faults.faulty_engine", str(directory), str(os.getpid()), "30", str(log))
            ],
        )
        patch.setattr(lives, "_FIRST_BACK_OFF_S", 0.01)
        patch.setattr(lives, "_MAX_DEATHS", 100)
        patch.setattr("tempfile.tempdir", str(runtime))
        given = {"model": str(tiny_model), "cpu_kernels": "off", "num_threads": "1"}
        given |= {"max_num_seqs": str(SEATS), "heartbeat_timeout": str(HEARTBEAT_TIMEOUT_S)}
        config, _ = resolve(read_options(given, {}), environment={})
        engine = AsyncEngine(config)
        engine.start()
        await asyncio.wait_for(engine.ready(), WAIT_S)
        yield engine
        pid = engine._engines.pids[0]
        await engine.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not list(runtime.glob("tokenyard-*")), "a folder was left behind"


def request(
    name: str, *prompt: int, max_tokens: int = 8, limits: TimeLimits = NO_LIMITS
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=(5, 6, *prompt),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        terms=ServiceTerms(time_limits=limits),
    )


async def tokens_of(engine: AsyncEngine, asked: GenerationRequest) -> list[int]:
    """Raises what ended it."""
    return [token async for _, output in engine.generate_all([asked]) for token in output.token_ids]


async def outcome(engine: AsyncEngine, asked: GenerationRequest) -> "list[int] | EngineError":
    try:
        return await asyncio.wait_for(tokens_of(engine, asked), WAIT_S)
    except EngineError as error:
        return error


async def begin(engine: AsyncEngine, asked: GenerationRequest) -> "asyncio.Task[list[int] | EngineError]":
    """Return when it has its first token."""
    begun = asyncio.Event()

    async def read() -> "list[int] | EngineError":
        tokens: list[int] = []
        try:
            async for _, output in engine.generate_all([asked]):
                tokens += output.token_ids
                begun.set()
        except EngineError as error:
            return error
        return tokens

    task = asyncio.create_task(read())
    await asyncio.wait_for(begun.wait(), WAIT_S)
    return task


def counted(engine: AsyncEngine) -> dict[str, float]:
    get = engine.metrics.registry.get_sample_value
    deaths = {each: get("tokenyard:engine_restarts_total", {"cause": each}) or 0 for each in DeathCause}
    return {**deaths, "replayed": get("tokenyard:requests_replayed_total") or 0}


def since(engine: AsyncEngine, before: dict[str, float]) -> dict[str, float]:
    """Counts since `before`, without zeros."""
    return {name: now - before[name] for name, now in counted(engine).items() if now != before[name]}


async def test_what_is_wrong_with_a_step_or_a_token_costs_those_requests_alone(engine: AsyncEngine) -> None:
    before, pid = counted(engine), engine._engines.pids[0]
    alone = await tokens_of(engine, request("alone", 7, max_tokens=40))
    for fault in (Fault.MEMORY, Fault.DEVICE_MEMORY, Fault.ANY_ERROR):
        assert isinstance(await outcome(engine, request(fault.name, fault)), RequestFailed)
        assert await outcome(engine, request("next", 7, max_tokens=40)) == alone
    for fault in (Fault.TOO_LARGE_TOKEN, Fault.NEGATIVE_TOKEN):
        beside = await begin(engine, request("beside", 7, max_tokens=40))
        assert isinstance(await outcome(engine, request(fault.name, fault)), RequestFailed)
        assert await beside == alone, "the neighbour does not notice"
    assert engine._engines.pids[0] == pid
    assert engine.health().is_ready
    assert since(engine, before) == {}


async def test_what_the_engine_had_begun_when_it_died_goes_on_in_the_next_and_the_rest_begins_there(
    engine: AsyncEngine,
) -> None:
    before = counted(engine)
    alone = [await tokens_of(engine, request(f"alone {i}", 10 + i)) for i in range(20)]
    ends: list[int] = []

    async def wait_for_turn(i: int) -> "list[int] | EngineError":
        result = await outcome(engine, request(f"waiting {i}", 10 + i))
        ends.append(i // SEATS)
        return result

    long = [request(f"running {i}", 30 + i, max_tokens=400) for i in range(SEATS)]
    whole = [await tokens_of(engine, each) for each in long]
    running = [await begin(engine, each) for each in long]
    waiting = [asyncio.create_task(wait_for_turn(i)) for i in range(20)]
    hurried = request("hurried", 9, limits=TimeLimits(first_token_s=0.5))
    others = [asyncio.create_task(outcome(engine, each)) for each in (hurried, request("left", 9))]
    await asyncio.sleep(0.05)
    assert engine._engines.pids[0]
    os.kill(engine._engines.pids[0], signal.SIGKILL)
    others[1].cancel()
    assert isinstance(await others[0], DeadlineExceeded)
    assert not any(each.done() for each in (*waiting, *running)), "time is over before an engine is there"
    assert await asyncio.gather(*waiting) == alone
    assert await asyncio.gather(*running) == whole
    assert ends == sorted(ends), "as many at a time as there are seats, in order of arrival"
    assert since(engine, before) == {"crash": 1, "replayed": 20 + SEATS}


async def test_a_request_that_kills_two_engines_is_not_given_to_a_third(
    engine: AsyncEngine, log: Path
) -> None:
    before = counted(engine)
    poison = asyncio.create_task(outcome(engine, request("poison", Fault.SEGFAULT)))
    assert isinstance(await poison, EngineDiedTwice)
    await asyncio.wait_for(engine.ready(), WAIT_S)
    assert since(engine, before) == {"crash": 2, "replayed": 1}
    assert log.read_text().count("Segmentation fault") == 2, "and the log has the stacks"
    assert await outcome(engine, request("next", 7))


async def test_an_engine_that_stands_still_in_a_step_is_replaced_and_the_log_says_where_it_stood(
    engine: AsyncEngine, log: Path
) -> None:
    before = counted(engine)
    # Both at once, and the long one first: a few steps later the other stands still, and nobody begins then.
    both = [request("beside", 7, max_tokens=400), request("stuck", Fault.HANG_LATER)]
    alone = await tokens_of(engine, both[0])
    running = await asyncio.gather(*(begin(engine, each) for each in both))
    waiting = asyncio.create_task(outcome(engine, request("waiting", 7)))
    assert len(await waiting) == 8
    assert await running[0] == alone
    assert len(await running[1]) == 8
    assert since(engine, before) == {"hang": 1, "replayed": 3}
    assert "in wait_for_ever" in log.read_text()


async def test_a_step_that_takes_longer_than_the_heartbeat_timeout_is_no_hang(engine: AsyncEngine) -> None:
    before = counted(engine)
    started_s = time.monotonic()
    assert len(await outcome(engine, request("slow", Fault.SLOW_LAYERS))) == 8
    took_s = time.monotonic() - started_s
    assert took_s > HEARTBEAT_TIMEOUT_S + lives._STACKS_S + 0.5, "else it proves nothing"
    assert since(engine, before) == {}
