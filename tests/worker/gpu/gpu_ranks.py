"""Ranks on GPUs that are none; `python -m tests.worker.gpu.gpu_ranks` is forked for all but rank 0.

Owns: the stand-ins of CUDA and NCCL of each rank, and the end of their process group.
The stand-in of CUDA has one device, the second: it is that of each rank, in a process of its own.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.worker.gpu.lazy_cuda import DEVICE, LazyCuda
from tests.worker.gpu.lazy_nccl import LazyNccl
from tests.worker.ranks.divided import DividedWorker, RankProcesses
from tests.worker.ranks.follower import become_rank, follow
from worker import worker
from worker.gpu import graphs, unfused
from worker.ranks import device_ranks

SHARED, OWN = "cuda:1", "cuda"
"""Devices: one for all ranks, or one for each."""
AT_ONCE = 2
"""Order in which a device does at once what it is asked: nobody waits for that of the other rank."""


@contextmanager
def stand_ins(device: str, seed: int | None) -> Iterator[LazyCuda]:
    with LazyCuda(seed=seed) as cuda, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_MIXED", (16,))
        patch.setattr(graphs, "_DRAFTED", (4, 8))
        for module in (worker, device_ranks):
            patch.setattr(module, "device_of_rank", lambda config, rank: str(DEVICE))
        patch.setattr(unfused, "choose_products", lambda products, device: None)  # each rank's own
        if device == OWN:
            LazyNccl(cuda).install(patch)
        yield cuda


@contextmanager
def rank_0(device: str, seed: int | None, division: str) -> Iterator[tuple[LazyCuda, DividedWorker]]:
    """Be rank 0 of a model that is divided so."""
    processes = RankProcesses("tests.worker.gpu.gpu_ranks", device)
    try:
        with stand_ins(device, seed) as cuda:
            yield cuda, DividedWorker(processes, division)
    finally:
        processes.close()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    group, places = become_rank()
    with stand_ins(*group.words, AT_ONCE):
        follow(places, Path(group.folder))
        os._exit(0)
