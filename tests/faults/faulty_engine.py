"""The engine process with faults on demand: a prompt that ends with one of these tokens meets its fault.

Run as engine.core.process is, with one more argument: the file for what it says on stderr. Only tests
start it: the engine itself has no such switch.
"""

# The real process imports torch in the same way; any other takes two seconds longer, at each start.
# ruff: noqa: E402
from worker.devices.lazy_imports import import_torch

import_torch("cpu")

import ctypes
import os
import sys
import threading
import time
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import torch

from engine.core import process
from scheduler.messages import SchedulerOutput, SequenceId
from worker.attention.ref_attention import RefAttention
from worker.steps.model_runner import EagerSteps
from worker.steps.protocol import ComputedStep
from worker.worker import Worker

LONG_LAYER_S = 1.6
"""Seconds of one layer, of which there are three."""


class Fault(IntEnum):
    """Token ids."""

    SEGFAULT = 90
    HANG_LATER = 91
    MEMORY = 92
    DEVICE_MEMORY = 93
    ANY_ERROR = 94
    TOO_LARGE_TOKEN = 95
    NEGATIVE_TOKEN = 96
    SLOW_LAYERS = 97


_NUM_STEPS_UNTIL_LATER = 4
"""Then the sequence has some tokens already."""


def strike(fault: Fault) -> None:
    """In the middle of a step."""
    match fault:
        case Fault.SEGFAULT:
            ctypes.string_at(0)
        case Fault.HANG_LATER:
            wait_for_ever()
        case Fault.MEMORY:
            raise MemoryError("planted")
        case Fault.DEVICE_MEMORY:
            raise torch.OutOfMemoryError("planted")
        case Fault.ANY_ERROR:
            raise RuntimeError("planted")


def wait_for_ever() -> None:
    """The name that is looked for in the log."""
    threading.Event().wait()


class FaultyWorker(Worker):
    """Knows which sequences bring a fault."""

    def __init__(self, *args: object, **changes: object) -> None:
        super().__init__(*args, **changes)  # type: ignore[arg-type]
        self._faults: dict[SequenceId, Fault] = {}
        self._num_steps: dict[SequenceId, int] = {}
        self._due: dict[SequenceId, Fault] = {}
        run = EagerSteps.compute

        def run_into_faults(*arguments):  # type: ignore[no-untyped-def]
            for fault in self._due.values():
                strike(fault)
            return run(*arguments)

        EagerSteps.compute = run_into_faults  # type: ignore[method-assign]

    def launch(self, plan: SchedulerOutput) -> ComputedStep:
        for new in plan.new_sequences:
            is_begun = len(new.token_ids) > new.num_prompt_tokens
            if not is_begun and new.token_ids[-1] in set(Fault):
                self._faults[new.sequence_id] = Fault(new.token_ids[-1])
        due = self._due = {
            share.sequence_id: self._faults[share.sequence_id]
            for share in plan.scheduled
            if share.sequence_id in self._faults and self._is_due(share.sequence_id)
        }
        quick = RefAttention.attend
        if Fault.SLOW_LAYERS in due.values():
            RefAttention.attend = slowed(quick)  # type: ignore[method-assign]
        try:
            output = super().launch(plan).result()
        finally:
            RefAttention.attend = quick  # type: ignore[method-assign]
        drawn = {**output.token_ids}
        for sequence_id, fault in due.items():
            if fault is Fault.TOO_LARGE_TOKEN:
                drawn[sequence_id] = (10**6,)
            elif fault is Fault.NEGATIVE_TOKEN:
                drawn[sequence_id] = (-1,)
        return ComputedStep(replace(output, token_ids=drawn))

    def _is_due(self, sequence_id: SequenceId) -> bool:
        num_steps = self._num_steps.setdefault(sequence_id, 0)
        self._num_steps[sequence_id] += 1
        match self._faults[sequence_id]:
            case Fault.SLOW_LAYERS:
                return num_steps == 0
            case Fault.HANG_LATER:
                return num_steps >= _NUM_STEPS_UNTIL_LATER
        return True


def slowed(attend):  # type: ignore[no-untyped-def]
    def slowly(self, *args):  # type: ignore[no-untyped-def]
        time.sleep(LONG_LAYER_S)
        return attend(self, *args)

    return slowly


if __name__ == "__main__":
    os.dup2(os.open(sys.argv[4], os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    sys.modules["worker.worker"].Worker = FaultyWorker  # type: ignore[attr-defined]
    process.leave(process.main(Path(sys.argv[1]), parent_pid=int(sys.argv[2]), log_level=int(sys.argv[3])))
