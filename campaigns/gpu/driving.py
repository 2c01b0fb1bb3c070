"""A scheduler over a worker, in the order of the engine's loop, without messages and clients.

Owns: how long each step took, and how long the host took to launch it.
Never: reads the worker's insides; what is measured is what serves.
"""

import importlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from campaigns.gpu.stand_ins import stand_in_for_grammars
from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason, SamplingParams, SchedulerOutput, SequenceId, SequenceOutput
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence

if TYPE_CHECKING:
    from worker.worker import Worker
    from worker.worker_config import ModelFacts


class StepFailed(Exception):
    """A sequence ended otherwise than by its length, or by `end_all`; the text is the worker's."""


class TimedStep(NamedTuple):
    """One step, after its result."""

    num_sequences: int
    num_tokens: int
    launch_s: float
    """Time of the host that launching took."""
    took_s: float
    """From the result before it, or from its own launch if that was later."""

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_sequences


class Drive:
    """Runs sequences to their end. Raises StepFailed, and whatever the worker raises."""

    def __init__(self, worker: "Worker", config: SchedulerConfig) -> None:
        self._worker = worker
        self.scheduler = Scheduler(config)
        self.steps: list[TimedStep] = []
        self.tokens: dict[SequenceId, list[int]] = {}
        self.tell: Callable[[list[SequenceOutput]], None] = lambda _: None
        """Called with the news of each step."""
        self._under_way: deque[tuple[SchedulerOutput, Any, float, float]] = deque()
        self._last_result_s = 0.0

    def add(self, prompt: list[int], max_tokens: int) -> SequenceId:
        sequence_id = SequenceId(len(self.tokens) + 1)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.scheduler.add_request(Sequence(sequence_id, tuple(prompt), params), now_s=time.perf_counter())
        self.tokens[sequence_id] = []
        return sequence_id

    def run(self) -> "Drive":
        """Until nothing is left."""
        while self.scheduler.has_unfinished_requests or self._under_way:
            self.turn()
        return self

    def end_all(self) -> None:
        """Leave the rest undone, but for the steps that are under way."""
        self.scheduler.finish_requests(tuple(self.tokens), FinishReason.ABORTED)
        while self._under_way:
            self._take_result()

    def free_rows(self) -> None:
        """The scheduler tells the last ones with its next plan, and here there is none."""
        nothing = SchedulerOutput(0, tuple(self.tokens), (), {}, (), 0)
        self._worker.launch(nothing).result()

    def turn(self) -> None:
        """Plan and launch a step; take the result of the oldest if no more may be under way."""
        plan = self.scheduler.schedule(now_s=time.perf_counter())
        if not plan.is_empty:
            launched_s = time.perf_counter()
            step = self._worker.launch(plan)
            self._under_way.append((plan, step, launched_s, time.perf_counter() - launched_s))
        if self._under_way and (plan.is_empty or not self.scheduler.can_schedule):
            self._take_result()

    def _take_result(self) -> None:
        plan, step, launched_s, launch_s = self._under_way.popleft()
        result = step.result()
        now_s = time.perf_counter()
        took_s = now_s - max(launched_s, self._last_result_s)
        self._last_result_s = now_s
        self.steps.append(TimedStep(len(plan.scheduled), plan.num_scheduled_tokens, launch_s, took_s))
        outputs = self.scheduler.update_from_output(plan, result).get(0, [])
        for output in outputs:
            self.tokens[output.sequence_id] += output.token_ids
            if output.finish_reason not in (None, FinishReason.LENGTH, FinishReason.ABORTED):
                raise StepFailed(f"{output.finish_reason}: {output.message}")
        self.tell(outputs)


def open_worker(folder: Path, target: str, **settings: Any) -> "tuple[Worker, ModelFacts]":
    """Load a checkpoint. `target` is cuda, or interpreted: a GPU that the CPU plays, for trying this out."""
    stand_in_for_grammars()
    from worker.worker import Worker
    from worker.worker_config import WorkerConfig

    if target == "interpreted":
        gpu = importlib.import_module("tests.worker.gpu.interpreted_gpu").InterpretedGpu
        config = WorkerConfig(model_path=str(folder), device="cpu", num_threads=1, **settings)
        worker = Worker(config, gpu)
    else:
        worker = Worker(WorkerConfig(model_path=str(folder), device=target, **settings))
    return worker, worker.load(lambda _: None)


def scheduler_config(facts: "ModelFacts", **settings: Any) -> SchedulerConfig:
    """Result as the engine makes it of the worker's."""
    found = {
        "num_blocks": facts.num_blocks,
        "block_size": facts.block_size,
        "max_model_len": facts.max_model_len,
        "num_host_blocks": facts.num_host_blocks,
        "copy_s_per_block": facts.copy_s_per_block,
        "max_plans_in_flight": 2 if facts.runs_ahead else 1,
        "groups": facts.groups,
    }
    return SchedulerConfig(**{**found, **settings})
