"""Steps of a model that pools: prompts in, vectors out.

Owns: the order of such a step: apply the plan's changes, compute, pool; the failure of single sequences.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from scheduler.messages import (
    BlockId,
    ModelRunnerOutput,
    NewSequence,
    PoolingParams,
    SchedulerOutput,
    SequenceId,
)
from worker.adapters.store import AdapterStore
from worker.sampling.compile_ahead import CompileAhead
from worker.steps.inputs import check_new_sequence
from worker.steps.protocol import ComputedStep
from worker.steps.row_table import RowTable
from worker.steps.sequence_table import apply_changes
from worker.worker_config import ModelFacts
from worker.worker_errors import SequenceRefused

_LITTLE_ENDIAN_FLOATS = "<f4"


class PooledPrompts(NamedTuple):
    """Vectors of one step."""

    sequence_ids: list[SequenceId]
    """[N], the sequences whose prompts ended in the step."""
    vectors_NE: Tensor


NOTHING_POOLED = PooledPrompts([], torch.empty(0, 0))


class PromptRunner(Protocol):
    """Computation of the prompts, or parts of prompts, of one step."""

    def copy_blocks(self, plan: SchedulerOutput) -> dict[BlockId, str]:
        """See SequenceTable."""

    def run(
        self, plan: SchedulerOutput, table: "PromptTable", failures: dict[SequenceId, str]
    ) -> PooledPrompts:
        """Compute the scheduled prompts; explains in `failures` each that cannot be computed."""

    def cut(self, vector_E: Tensor, num_dimensions: int | None) -> Tensor:
        """Return the part of a vector that was asked for."""


class PromptTable:
    """A SequenceTable: rows of the worker, and the pooling parameters of each."""

    def __init__(self, facts: ModelFacts, rows: RowTable, runner: PromptRunner) -> None:
        assert facts.pooling is not None, "only for models that pool"
        self.rows = rows
        self.copy_blocks = runner.copy_blocks
        self.params: dict[SequenceId, PoolingParams] = {}
        self._vocab_size = facts.vocab_size
        self._pooling = facts.pooling

    def add(self, new: NewSequence) -> None:
        params = new.pooling
        if params is None:
            raise SequenceRefused("this model does not generate")
        if params.task is not self._pooling.task:
            raise SequenceRefused(f"asked to {params.task}, but this model is there to {self._pooling.task}")
        if params.prompt is not self._pooling.prompt:
            raise SequenceRefused(f"its prompt is {params.prompt}; this model needs {self._pooling.prompt}")
        check_new_sequence(new, self._vocab_size)
        self.rows.add(new)
        self.params[new.sequence_id] = params

    def release(self, sequence_id: SequenceId) -> None:
        self.rows.release(sequence_id)
        self.params.pop(sequence_id, None)


class PoolingSteps:
    """Steps that pool prompts."""

    def __init__(self, table: PromptTable, runner: PromptRunner) -> None:
        self._table = table
        self._runner = runner

    adapters: AdapterStore | None = None
    grammars: CompileAhead | None = None

    def launch(self, plan: SchedulerOutput) -> ComputedStep:
        """See Steps. The step is computed when this returns."""
        return ComputedStep(self._compute_plan(plan))

    def describe(self) -> str:
        return ""

    def _compute_plan(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. An error in one sequence fails that sequence; the others go on."""
        failures: dict[SequenceId, str] = {}
        apply_changes(plan, self._table, failures)
        result = self._runner.run(plan, self._table, failures)
        pooled = {}
        for sequence_id, vector_E in zip(result.sequence_ids, result.vectors_NE.cpu(), strict=True):
            if not bool(vector_E.isfinite().all()):
                failures[sequence_id] = "the model's hidden states are not finite"
                continue
            wanted_E = self._runner.cut(vector_E, self._table.params[sequence_id].num_dimensions)
            pooled[sequence_id] = wanted_E.numpy().astype(_LITTLE_ENDIAN_FLOATS).tobytes()
        return ModelRunnerOutput(token_ids={}, logprobs={}, failures=failures, pooled=pooled)
