"""Plans in flight: launched one after another, and collected late."""

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scheduler.messages import ModelRunnerOutput, SequenceId
from tests.worker.plan_driver import PlanDriver, groups_of
from worker.steps.generation_step import GenerationSteps
from worker.steps.inputs import StepInputs
from worker.steps.model_runner import EagerSteps
from worker.steps.protocol import LaunchedStep
from worker.steps.row_table import UNKNOWN_TOKEN
from worker.steps.tokens import StepOutcome
from worker.worker import Worker

_PLACEHOLDER = -1


class AheadDriver(PlanDriver):
    """A PlanDriver that keeps fewer than `depth` steps in flight; their tokens are placeholders."""

    def __init__(self, worker: Worker, block_size: int, depth: int, **options: bool) -> None:
        self.groups = groups_of(worker)
        super().__init__(self, block_size, **options)  # type: ignore[arg-type]
        self._launcher = worker
        self._depth = depth
        self._in_flight: deque[LaunchedStep] = deque()

    def execute(self, plan: Any) -> ModelRunnerOutput:
        """For PlanDriver: what it believes to be the result says that every token is unknown."""
        self._in_flight.append(self._launcher.launch(plan))
        drawn = [share.sequence_id for share in plan.scheduled if share.samples]
        while len(self._in_flight) >= self._depth:
            self._collect_oldest(drawn if len(self._in_flight) == 1 else [])
        placeholders = {} if not self._in_flight else {each: (_PLACEHOLDER,) for each in drawn}
        return ModelRunnerOutput(token_ids=placeholders, logprobs={}, failures={})

    def collect_all(self) -> None:
        while self._in_flight:
            self._collect_oldest([])

    def _collect_oldest(self, just_drawn: list[SequenceId]) -> None:
        output = self._in_flight.popleft().result()
        assert not output.failures, output.failures
        for sequence_id, tokens in output.token_ids.items():
            known = self._sequences[sequence_id].token_ids
            if sequence_id in just_drawn:
                known += tokens
            else:
                known[known.index(_PLACEHOLDER)] = tokens[0]

    def generated(self, sequence_id: int) -> list[int]:
        """With placeholders for what is in flight."""
        return super().generated(sequence_id)

    def preempt(self, sequence_id: int) -> None:
        """Once its tokens are known, as the scheduler does."""
        self.collect_all()
        super().preempt(sequence_id)

    def swap_out(self, sequence_id: int) -> None:
        self.collect_all()
        super().swap_out(sequence_id)


class RememberingSteps:
    """EagerSteps that do what a GPU does with tokens that the host does not know."""

    def __init__(self, steps: EagerSteps, num_rows: int) -> None:
        self._steps = steps
        self._last_token_C = np.full(num_rows, UNKNOWN_TOKEN)
        self._rows: list[int] = []
        self.num_filled = 0
        self.head, self.describe = steps.head, steps.describe
        self.accept_drafts = steps.accept_drafts

    def compute(self, inputs: StepInputs) -> StepOutcome:
        return self._steps.compute(self._filled(inputs))

    def remember(self, token_ids_N: Tensor) -> None:
        self._last_token_C[self._rows] = token_ids_N.numpy()

    def _filled(self, inputs: StepInputs) -> StepInputs:
        self._rows = inputs.rows
        is_unknown_T = inputs.input_ids_T == UNKNOWN_TOKEN
        self.num_filled += int(is_unknown_T.sum())
        inputs.input_ids_T[is_unknown_T] = self._last_token_C[inputs.rows_T[is_unknown_T]]
        return inputs


def let_work_ahead(worker: Worker) -> RememberingSteps:
    """Make a CPU's worker collect late, as if its device were computing meanwhile."""
    steps: Any = worker._steps
    assert isinstance(steps, GenerationSteps)
    steps._steps = RememberingSteps(steps._steps, num_rows=64)
    steps._works_ahead = True
    return steps._steps


def nan_for(row: int, steps: RememberingSteps) -> None:
    """Let the next logits of a place in the batch be no numbers."""
    compute = steps.compute

    def once(inputs: StepInputs) -> StepOutcome:
        steps.compute = compute  # type: ignore[method-assign]
        logits_NV = compute(inputs).logits_NV.clone()
        logits_NV[row] = torch.nan
        return StepOutcome(logits_NV)

    steps.compute = once  # type: ignore[method-assign]
