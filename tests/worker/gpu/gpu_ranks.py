"""Two ranks on GPUs that are none: `python -m tests.worker.gpu.gpu_ranks CASE`, and its other rank.

Owns: the stand-ins of CUDA and NCCL in a process of each rank, and the cases, whose tokens rank 0 prints.
A process has one process group for all its life, as a rank has.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.worker.gpu import lazy_driver
from tests.worker.ranks.divided import TWO_SHARDS, DividedWorker, RankProcesses
from tests.worker.ranks.follower import follow
from worker.ranks.rank_places import RankPlace

SHARED, OWN = "cuda:1", "cuda"
"""Devices: one for both ranks, or one for each."""
_AT_ONCE = 2
"""Order in which a device does at once what it is asked."""


@dataclass(frozen=True)
class Case:
    """One model, and the way in which two ranks compute it."""

    folder: str
    device: str
    seed: int | None = None
    """Order of work on the device of rank 0."""
    options: dict[str, Any] = field(default_factory=dict)
    plant: str | None = None
    """Fault of both ranks."""


@contextmanager
def device_of(rank: int, device: str, seed: int | None) -> Iterator[None]:
    """Open the stand-ins for one rank."""
    if device == OWN:
        lazy_driver.DEVICE_INDEX = rank  # before it is read by others
    from tests.worker.gpu.lazy_cuda import LazyCuda
    from tests.worker.gpu.lazy_nccl import LazyNccl
    from worker.gpu import graphs

    graphs._MIXED = (16,)
    with LazyCuda(seed=seed) as cuda, pytest.MonkeyPatch.context() as patch:
        if device == OWN:
            LazyNccl(cuda).install(patch)
        yield


def lead(case: Case) -> None:
    """Compute the case as rank 0, and print what it gives."""
    from tests.worker.conftest import BLOCK_SIZE
    from tests.worker.gpu import test_gpu_worker as whole
    from tests.worker.gpu.ahead import AheadDriver
    from worker.worker_config import WorkerConfig

    processes = RankProcesses("tests.worker.gpu.gpu_ranks", case.device)
    try:
        worker = DividedWorker(processes, TWO_SHARDS)
        settings = {**whole.SETTINGS, "device": case.device, **case.options}
        facts = worker.load(WorkerConfig(model_path=case.folder, num_ranks=2, **settings))
        driver = AheadDriver(worker, BLOCK_SIZE, depth=2)  # type: ignore[arg-type]
        tokens = whole.serve(driver)
        driver.release_all()
        print(json.dumps({"tokens": tokens, "steps": whole.steps_of(worker._worker).describe(), "device": facts.device}))
    finally:
        processes.close()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        case = msgspec.json.decode(sys.argv[1], type=Case)
        with device_of(0, case.device, case.seed):
            lead(case)
    else:
        device, places, folder = sys.argv[1:]
        with device_of(1, device, _AT_ONCE):
            follow(msgspec.json.decode(places, type=dict[str, RankPlace]), Path(folder))
