"""An engine process and its ranks, one of which raises where a file says: RANK and a Place.

Run as engine.core.process is, with one more argument: the file for what all say on stderr. Only tests
start it.
"""

# The real process imports torch in the same way; any other takes two seconds longer, at each start.
# ruff: noqa: E402
from worker.devices.lazy_imports import import_torch

import_torch("cpu")

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.core import process, rank_process
from engine.nodes import rank_start
from worker.cpu.layer import CpuLayer
from worker.cpu.toolkit import CpuToolkit
from worker.sampling.rank_samplers import FollowingSampler
from worker.sampling.sampler import Sampler

FAULT_FILE = "fault"
"""Beside the directory of the engine process."""
NAME = "tests.faults.faulty_ranks"


class Place(StrEnum):
    """A place in a step."""

    BETWEEN = "between"  # the sums of two layers
    AFTER = "after"  # the last sum, and the logits


def plant(directory: Path, rank: int) -> None:
    """Look for the file at each place."""
    file = directory.parent / FAULT_FILE

    def strike_at(place: Place) -> None:
        if file.exists() and file.read_text() == f"{rank} {place}":
            file.unlink()
            raise RuntimeError(f"planted {place} the sums")

    compute = CpuLayer.forward

    def forward(self: Any, *arguments: Any, **others: Any) -> Any:
        if self.layer_idx:
            strike_at(Place.BETWEEN)
        return compute(self, *arguments, **others)

    CpuLayer.forward = forward  # type: ignore[method-assign]
    CpuToolkit._join_layers = lambda *_: None  # type: ignore[method-assign]  # one call has no place between
    sampler = FollowingSampler if rank else Sampler
    launch = sampler._launch

    def launch_then_fail(*arguments: Any) -> Any:
        strike_at(Place.AFTER)
        return launch(*arguments)

    sampler._launch = launch_then_fail  # type: ignore[method-assign]


def main() -> int:
    directory, *numbers = Path(sys.argv[1]), *sys.argv[2:]
    if numbers[2].startswith("{"):
        place = rank_process.read_place(numbers[2])
        plant(directory, place.rank)
        return rank_process.main(directory, int(numbers[0]), int(numbers[1]), place)
    os.dup2(os.open(numbers[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    rank_start.RANK_MODULE = NAME
    plant(directory, rank=0)
    return process.main(directory, parent_pid=int(numbers[0]), log_level=int(numbers[1]))


if __name__ == "__main__":
    process.leave(main())
