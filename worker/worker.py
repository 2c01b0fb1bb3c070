"""The worker: one model on one device, which carries out plans."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from worker.adapters.store import AdapterStore
from worker.devices.device import Device, open_device
from worker.machine import return_freed_memory
from worker.model_start import start_steps
from worker.progress import run_reporting
from worker.ranks.device_ranks import device_of_rank
from worker.ranks.ranks import ALONE, Ranks, number_of
from worker.sampling.compile_ahead import CompileAhead
from worker.steps.protocol import LaunchedStep, Steps, naming_out_of_memory
from worker.worker_config import LoadProgress, ModelFacts, WorkerConfig
from worker.worker_errors import StartupError, refused_as

log = logging.getLogger(__name__)

# A small model frees less than looking for it costs: about half a second where transformers is loaded.
_WORTH_RETURNING_BYTES = 64 << 20


class Worker:
    """A worker that loads once, then launches plans one after another. Not thread-safe."""

    def __init__(
        self,
        config: WorkerConfig,
        open_device: Callable[[WorkerConfig], Device] = open_device,
        ranks: Ranks = ALONE,
    ) -> None:
        self._config = config
        self._open_device = open_device
        self._ranks = ranks
        self._device: Device | None = None
        self._steps: Steps | None = None

    def load(self, report: Callable[[LoadProgress], None]) -> ModelFacts:
        """Load the weights, measure memory, allocate the KV cache, warm up.

        `report` is called in this thread, at least every half second. Raises StartupError with one
        line that says what is wrong and what to do.
        """
        # Here and not in the loading thread: the number of compute threads is set for each thread.
        own_device = device_of_rank(self._config, number_of(self._ranks))
        device = self._open_device(replace(self._config, device=own_device))
        # What a device or another rank does may pass; what files say stays.
        passing = (OSError, MemoryError, *((RuntimeError,) if device.torch_device.type != "cpu" else ()))
        refusal = partial(StartupError, fix="check the files of the model; --log-level debug says more")
        with refused_as(refusal, self._config.model_path, but=passing):
            facts, self._steps = run_reporting(
                lambda stage: start_steps(self._config, device, stage, self._ranks), report
            )
        self._device = device
        if facts.weight_bytes >= _WORTH_RETURNING_BYTES:
            return_freed_memory()  # of weights before they were rounded or packed
        return facts

    @property
    def adapters(self) -> AdapterStore | None:
        """The adapters that sequences may have, once the model is loaded; None: none are computed."""
        return None if self._steps is None else self._steps.adapters

    @property
    def grammars(self) -> CompileAhead | None:
        """The side that compiles grammars during steps, once the model is loaded; None: it has none."""
        return None if self._steps is None else self._steps.grammars

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """See Steps.launch. Raises StepOutOfMemory, as may the result.

        After any error, steps that were launched before can still be collected.
        """
        assert self._steps is not None, "launch comes after load and before close"
        assert self._device is not None
        steps = self._steps
        return naming_out_of_memory(self._device, lambda: steps.launch(plan))

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Launch one step and wait for it."""
        return self.launch(plan).result()

    def close(self) -> None:
        """Release the model and the cache; their memory returns once no other reference is left."""
        if self._steps is not None and (done := self._steps.describe()):
            log.info("%s", done)
        if self._device is not None:
            with suppress(RuntimeError):  # a broken device has nothing left to do
                self._device.wait()  # blocks may still be on their way to the host's pool
        self._steps = self._device = None
