"""Workers over tiny checkpoints, each loaded once per module and given back empty after each test."""

import importlib.util
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.worker.plan_driver import PlanDriver
from worker.worker import Worker
from worker.worker_config import ModelFacts, WorkerConfig

# They try the worker within an engine, which needs the server's packages.
collect_ignore = (
    []
    if importlib.util.find_spec("orjson")
    else ["checkpoint/test_checksums.py", "sampling/test_grammar.py", "test_out_of_memory.py"]
)

BLOCK_SIZE = 4

MakeCheckpoint = Callable[..., Path]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each test, with the fixtures that it is the first to use, the same random numbers each time."""
    torch.default_generator.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Build a family's checkpoint on first use."""
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda family: make_checkpoint(family, root / family)


def load_worker(folder: Path, **options: object) -> tuple[Worker, ModelFacts]:
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
    }
    worker = Worker(WorkerConfig(model_path=str(folder), **{**settings, **options}))  # type: ignore[arg-type]
    return worker, worker.load(lambda progress: None)


@pytest.fixture(scope="module")
def llama_worker(checkpoints: MakeCheckpoint) -> Worker:
    return load_worker(checkpoints("llama"))[0]


@pytest.fixture
def llama(llama_worker: Worker) -> Iterator[PlanDriver]:
    driver = PlanDriver(llama_worker, BLOCK_SIZE)
    yield driver
    driver.release_all()
