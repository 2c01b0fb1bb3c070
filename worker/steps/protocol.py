"""The protocol of a worker's steps, and the result of a step that was launched."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from worker.adapters.store import AdapterStore
from worker.devices.device import Device
from worker.sampling.compile_ahead import CompileAhead
from worker.worker_errors import StepOutOfMemory

Result = TypeVar("Result")


class LaunchedStep(Protocol):
    """A step that the device was asked for."""

    @property
    def sampled(self) -> list[int]:
        """Tokens that it sampled, once there is a result: for ranks that do not sample, in their order."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step. Call in the order of the launches; a second call returns the same."""


class Steps(Protocol):
    """Plans of one loaded model, launched one after another."""

    adapters: AdapterStore | None
    """The adapters that sequences may have; None: the steps compute none."""
    grammars: CompileAhead | None
    """Compiler of grammars during steps; None: the steps take no sequences with one."""

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Ask the device for a step. An error in one sequence fails that sequence; the others go on.

        Raises torch.OutOfMemoryError. After that, or any other error, steps that were launched before can
        still be collected.
        """

    def describe(self) -> str:
        """Sum up the steps so far in one line for the log; empty if there is nothing to report."""


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A LaunchedStep that has nothing left to wait for."""

    output: ModelRunnerOutput
    sampled: list[int] = field(default_factory=list)

    def result(self) -> ModelRunnerOutput:
        return self.output


def naming_out_of_memory(device: Device, work: Callable[[], Result]) -> Result:
    """Run `work`. If the device is out of memory, release its cached memory and raise StepOutOfMemory."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
    # Outside the handler: the traceback keeps the step's tensors alive.
    device.release_cached_memory()
    raise StepOutOfMemory(reason)
