"""Some trials in a process of their own: `python -m campaigns.gpu.first.group NAME`, begun by part.py.

Owns: what is in which group, and one line of JSON before and after each trial, so that whoever reads them
knows what a process died of.
Never: goes on after an error that leaves the device unusable: the next process takes up behind it.
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from campaigns.gpu.first.trial import Build, Place
from campaigns.gpu.stand_ins import stand_in_for_grammars

UNUSABLE = 3
"""Exit status: an error has left the device unusable for this process."""
_LONGEST_MESSAGE = 300

KERNELS = ("layer", "attention", "sampling", "expert", "code")
NAMES = (
    "device",
    *(f"{kind}-{dtype}" for kind in KERNELS for dtype in ("bfloat16", "float32")),
    "worker",
)
INTERPRETED_NAMES = tuple(name for name in NAMES if "bfloat16" not in name)
"""Triton's interpreter cannot multiply bfloat16."""


def trials_of(name: str, device: torch.device, folder: Path) -> list[Build]:
    """Trials of one group; `folder` is for their files. Modules are imported here: one may be broken."""
    stand_in_for_grammars()
    if name == "device":
        module = importlib.import_module("campaigns.gpu.first.device_trials")
        found = module.device_trials(Place(device, torch.float32), _opener(device))
    elif name == "worker":
        module = importlib.import_module("campaigns.gpu.first.worker_trials")
        found = module.worker_trials(folder, "cuda" if device.type == "cuda" else "interpreted")
    else:
        kind, dtype = name.split("-")
        module = importlib.import_module(f"campaigns.gpu.first.{kind}_trials")
        found = getattr(module, f"{kind}_trials")(Place(device, getattr(torch, dtype)))
    trials: list[Build] = found
    return trials


def _opener(device: torch.device) -> Any:
    """Function that opens the device for a worker."""
    if device.type == "cuda":
        return importlib.import_module("worker.devices.device").open_device
    return importlib.import_module("tests.worker.gpu.interpreted_gpu").InterpretedGpu


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.gpu.first.group")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--notes", type=Path, required=True, help="where the lines go")
    parser.add_argument("--skip", type=int, default=0, help="so many trials were made before")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(argv)
    device = torch.device("cpu" if options.smoke else "cuda")
    if options.smoke:
        importlib.import_module("tests.worker.gpu.interpreter").mend_interpreter()
    with tempfile.TemporaryDirectory() as folder, options.notes.open("a", encoding="utf-8") as notes:
        trials = trials_of(options.name, device, Path(folder))
        return run(trials[options.skip :], Notes(notes), device)


class Notes:
    """Lines for the process that waits for this one."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, **fields: str | bool | float) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()


def run(trials: Sequence[Build], notes: Notes, device: torch.device) -> int:
    """Try all; returns UNUSABLE where one has broken the device."""
    for build in trials:
        notes.write(trial="its inputs", inputs="-")
        started_s = time.perf_counter()
        try:
            trial = build()
            notes.write(trial=trial.name, inputs=trial.inputs)
            remark, is_right = trial.work(), True
            _synchronize(device)
        except Exception as error:  # noqa: BLE001 - what is broken is told, and must not hide the others
            remark, is_right = _told(error), False
        notes.write(is_right=is_right, remark=remark, took_s=time.perf_counter() - started_s)
        if not is_right and not _is_usable(device):
            return UNUSABLE
    return 0


def _told(error: BaseException) -> str:
    """Its name and its first line, and those of what it was raised from."""
    cause = error.__cause__ or error.__context__
    lines = str(error).strip().splitlines() or [""]
    told = f"{type(error).__name__}: {lines[0]}"[:_LONGEST_MESSAGE]
    return told if cause is None else f"{told} <- {_told(cause)}"[: 2 * _LONGEST_MESSAGE]


def _is_usable(device: torch.device) -> bool:
    try:
        _synchronize(device)
    except RuntimeError:
        return False
    return True


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
