"""Ranks that tests of several files share: their processes are started once."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.ranks.divided import GLOO, GRID, TWO_SHARDS, TWO_STAGES, DividedWorker, RankProcesses
from worker.cpu.kernel_build import CannotBuild, build_library, find_library
from worker.ranks.places import make_page
from worker.ranks.shared_ranks import SharedRanks
from worker.ranks.stage import Stage

SIZE = 3
"""Number of ranks that threads of one process are."""


@pytest.fixture(scope="module")
def three() -> list[SharedRanks]:
    try:
        library = find_library() or build_library()
    except CannotBuild as error:
        pytest.skip(str(error))
    page = make_page()
    ranks = [SharedRanks(page, rank=rank, size=SIZE, stage=Stage(0, 1)) for rank in range(SIZE)]
    os.close(page)
    for each in ranks:
        each.join(library)
    return ranks


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
