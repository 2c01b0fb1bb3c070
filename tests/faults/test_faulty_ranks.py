"""One rank raises in the middle of a step: all ranks end, and the next group goes on with the request."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.frontend.client import AsyncEngine
from engine.options.engine_config import resolve
from engine.options.sources import read_options
from engine.processes import engine_processes as lives
from engine.processes import supervisor
from tests.faults.faulty_ranks import FAULT_FILE, NAME, Place
from tests.faults.test_faulty_engine import WAIT_S, request, tokens_of

pytestmark = [pytest.mark.night, pytest.mark.asyncio(loop_scope="module")]

STARTS_WITHIN_S = 3 * WAIT_S
NUM_LONG = 200


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which engine processes have theirs."""
    return tmp_path_factory.mktemp("runtime")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path, runtime: Path) -> AsyncIterator[AsyncEngine]:
    """One for all tests; afterwards nothing of it is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            supervisor,
            "_child_arguments",
            lambda directory: ["-m", NAME, str(directory), str(os.getpid()), "30", str(runtime / "log")],
        )
        patch.setattr(lives, "_FIRST_BACK_OFF_S", 0.01)
        patch.setattr(lives, "_MAX_DEATHS", 100)
        patch.setattr("tempfile.tempdir", str(runtime))
        given = {"model": str(tiny_model), "tensor_parallel_size": "2", "num_threads": "1"}
        config, _ = resolve(read_options({**given, "dtype": "float32"}, {}), environment={})
        engine = AsyncEngine(config)
        engine.start()
        await asyncio.wait_for(engine.ready(), STARTS_WITHIN_S)
        yield engine
        await engine.close()
    assert not list(runtime.glob("tokenyard-*")), "a folder was left behind"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(engine: AsyncEngine) -> list[int]:
    """Tokens of the first group, which each later one must have too."""
    return await tokens_of(engine, request("first"))


def ranks_of(engine: AsyncEngine) -> list[int]:
    pid = engine._engines.pids[0]
    assert pid is not None
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.parametrize(("rank", "place"), [(0, Place.BETWEEN), (1, Place.AFTER)])
async def test_an_exception_on_one_rank_ends_all_and_the_next_group_goes_on(
    engine: AsyncEngine, expected: list[int], runtime: Path, rank: int, place: Place
) -> None:
    pids = ranks_of(engine)
    assert len(pids) == 2
    outputs = engine.generate_all([request("struck", max_tokens=NUM_LONG)])
    tokens = list((await anext(outputs))[1].token_ids)
    (runtime / FAULT_FILE).write_text(f"{rank} {place}")
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.02)
    assert f"planted {place} the sums" in (runtime / "log").read_text()
    async with asyncio.timeout(STARTS_WITHIN_S):
        async for _, output in outputs:
            tokens += output.token_ids
    assert tokens == await tokens_of(engine, request("undisturbed", max_tokens=NUM_LONG))
    assert await tokens_of(engine, request(f"next {place}")) == expected
