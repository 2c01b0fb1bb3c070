"""The worker: one model on one device, which does what a plan says and decides nothing.

Owns: which of the three kinds of steps a model is served with, and out of memory told by its own name.
Never: chooses what is computed (scheduler/), or knows of requests, text or clients.
"""

import logging
from collections.abc import Callable
from contextlib import suppress

from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from worker.checkpoint.task import Task
from worker.devices.device import Device, open_device
from worker.own_cache.own_cache_steps import OwnCacheSteps
from worker.pooling.pooling_step import PoolingSteps
from worker.progress import LoadStage, run_reporting
from worker.startup.loader import find_kind
from worker.startup.start_generation import start_generating
from worker.startup.start_own_cache import start_with_own_caches
from worker.startup.start_pooling import start_pooling
from worker.steps.generation_step import ComputedStep, GenerationSteps, LaunchedStep, telling_out_of_memory
from worker.worker_config import LoadProgress, ModelFacts, WorkerConfig
from worker.worker_errors import FamilyRefused

log = logging.getLogger(__name__)


class Worker:
    """Load once, then launch plans one after another. Not for several threads."""

    def __init__(
        self, config: WorkerConfig, open_device: Callable[[WorkerConfig], Device] = open_device
    ) -> None:
        self._config = config
        self._open_device = open_device
        self._device: Device | None = None
        self._steps: GenerationSteps | PoolingSteps | OwnCacheSteps | None = None

    def load(self, report: Callable[[LoadProgress], None]) -> ModelFacts:
        """Load the weights, measure memory, allocate the KV cache, warm up.

        `report` is called in this thread, at least every half second. Raises StartupError with one
        line that says what is wrong and what to do.
        """
        # Here and not in the loading thread: the number of compute threads is set for each thread.
        device = self._open_device(self._config)
        facts, self._steps = run_reporting(lambda stage: self._start(device, stage), report)
        self._device = device
        return facts

    def _start(
        self, device: Device, stage: LoadStage
    ) -> tuple[ModelFacts, GenerationSteps | PoolingSteps | OwnCacheSteps]:
        device.make_current()
        kind = find_kind(self._config)
        if kind.task is not Task.GENERATE:
            return start_pooling(self._config, kind, device, stage)
        try:
            return start_generating(self._config, kind, device, stage)
        except FamilyRefused as error:
            refused = error.what  # not the error: it holds the frames, and they the model's memory
        return start_with_own_caches(self._config, kind, device, stage, refused)

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Ask the device for a step. What is wrong with one sequence fails that sequence; the others go on.

        Raises StepOutOfMemory, as may the result. After that, or any other error, steps that were launched
        before can still be collected.
        """
        assert self._steps is not None, "launch comes after load and before close"
        assert self._device is not None
        steps = self._steps
        if isinstance(steps, GenerationSteps):
            return telling_out_of_memory(self._device, lambda: steps.launch(plan))
        return ComputedStep(telling_out_of_memory(self._device, lambda: steps.execute(plan)))

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Do one step and wait for it."""
        return self.launch(plan).result()

    def close(self) -> None:
        """Let go of the model and the cache; their memory returns when nobody else holds them."""
        if isinstance(self._steps, GenerationSteps) and (done := self._steps.describe()):
            log.info("%s", done)
        if self._device is not None:
            with suppress(RuntimeError):  # a device that is broken does nothing any more
                self._device.wait()  # blocks may still be on their way to the host's pool
        self._steps = self._device = None
