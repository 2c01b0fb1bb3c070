"""The part `tune`: compiles all candidates in many processes, then measures one after the other.

Owns: the measurement, and the table of the fastest beside those that serve.
Never: changes what serves.

    python -m campaigns.gpu --out FOLDER --parts tune
"""

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from triton import TritonError

from campaigns.gpu.results import Record, Table
from campaigns.gpu.tune.candidates import Question, questions
from campaigns.gpu.tune.timing import time_calls
from worker.devices.device import Device, open_device
from worker.worker_config import WorkerConfig

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_ROOT = Path(__file__).resolve().parents[3]
_SHAPES = ("llama-3.1-8b", "qwen3-0.6b")
_MOST_COMPILERS = 14
_COMPILED_WITHIN_S = 120.0
_NOT_WORTH_IT = 0.02
"""A gain that is smaller than this may be chance."""


def run(record: Record, settings: "Settings") -> None:
    device = torch.device("cpu" if settings.is_smoke else "cuda")
    if settings.is_smoke:
        importlib.import_module("tests.worker.gpu.interpreter").mend_interpreter()
    else:
        seconds = _compile_all()
        record.note(f"Compiled in {seconds:.0f} s.")
    columns = ("Kernel", "Load", "Serves", "Time", "Fastest", "Time", "Gain")
    best = record.table("The fastest", *columns)
    everything = record.table("All", "Kernel", "Load", "Choice", "Time")
    opened = None if settings.is_smoke else open_device(WorkerConfig(model_path="", device="cuda"))
    for question in _questions(device):
        _answer(question, opened, best, everything)


def _questions(device: torch.device) -> list[Question]:
    is_smoke = device.type == "cpu"
    return list(questions(device, shape_names=("tiny",) if is_smoke else _SHAPES, is_smoke=is_smoke))


def _answer(question: Question, device: Device | None, best: Table, everything: Table) -> None:
    """Measure all candidates of one question, and let go of its inputs."""
    times_s: dict[str, float] = {}
    serving = ""
    for candidate in question.candidates:
        if candidate.serves:
            serving = candidate.name
        try:
            seconds = time_calls(candidate.calls, device)
        except TritonError as error:  # too much shared memory, say
            everything.add(question.kernel, question.load, candidate.name, str(error).splitlines()[0][:80])
            continue
        times_s[candidate.name] = seconds
        everything.add(question.kernel, question.load, candidate.name, f"{seconds * 1e6:.2f} us")
    if not times_s:
        best.add(question.kernel, question.load, serving, "none runs", "-", "-", "-")
        return
    fastest = min(times_s, key=lambda name: times_s[name])
    gain = 1 - times_s[fastest] / times_s[serving] if serving in times_s else 1.0
    told = [fastest, f"{times_s[fastest] * 1e6:.2f} us", f"{gain:.0%}"]
    serves = f"{times_s[serving] * 1e6:.2f} us" if serving in times_s else "does not run"
    worth = told if gain > _NOT_WORTH_IT else ["the same", "-", "-"]
    best.add(question.kernel, question.load, serving, serves, *worth)
    del question.candidates


def _compile_all() -> float:
    """Launch each candidate once, in many processes: Triton keeps what it has compiled on disk."""
    started_s = time.perf_counter()
    count = max(1, min(_MOST_COMPILERS, (os.cpu_count() or 1) - 1))
    command = [sys.executable, "-m", "campaigns.gpu.tune.part", "--of", str(count), "--share"]
    compilers = [subprocess.Popen([*command, str(number)], cwd=_ROOT) for number in range(count)]
    for compiler in compilers:
        left_s = _COMPILED_WITHIN_S - (time.perf_counter() - started_s)
        try:
            compiler.wait(max(left_s, 1.0))
        except subprocess.TimeoutExpired:
            compiler.kill()  # what it has not compiled is compiled when it is measured
            compiler.wait()
    return time.perf_counter() - started_s


def _compile_share(share: int, count: int) -> None:
    """In a process of its own. A candidate that cannot be launched is told by the process that measures."""
    number = 0
    for question in _questions(torch.device("cuda")):
        for candidate in question.candidates:
            if number % count == share:
                try:
                    candidate.calls[0]()
                except TritonError:
                    print(f"{question.kernel}: {candidate.name} does not fit")
            number += 1
        del question.candidates
    torch.cuda.synchronize()


if __name__ == "__main__":
    importlib.import_module("campaigns.gpu.stand_ins")
    parser = argparse.ArgumentParser(prog="python -m campaigns.gpu.tune.part")
    parser.add_argument("--share", type=int, required=True)
    parser.add_argument("--of", type=int, required=True)
    options = parser.parse_args()
    _compile_share(options.share, options.of)
