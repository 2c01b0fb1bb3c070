"""Ranks that tests of several files share: their processes are started once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.ranks.divided import GLOO, GRID, TWO_SHARDS, TWO_STAGES, DividedWorker, RankProcesses


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[RankProcesses]:
    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def two_ranks(rank_processes: RankProcesses) -> DividedWorker:
    return DividedWorker(rank_processes, TWO_SHARDS)


@pytest.fixture(scope="session")
def two_by_gloo(rank_processes: RankProcesses) -> DividedWorker:
    return DividedWorker(rank_processes, GLOO)


@pytest.fixture(scope="session")
def two_stages(rank_processes: RankProcesses) -> DividedWorker:
    return DividedWorker(rank_processes, TWO_STAGES)


@pytest.fixture(scope="session")
def grid(rank_processes: RankProcesses) -> DividedWorker:
    return DividedWorker(rank_processes, GRID)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")
