"""A worker's steps where tokens are generated.

Owns: the order of a step: release, swap, copy, add, grow, compute, draw; and what a step that was launched
becomes when it is collected. On a device that works ahead, launching asks for all of this and waits for
none of it:

    launch(1)   launch(2)   1.result()   launch(3)   2.result()

The device carries steps out in the order in which they were launched. What a later one copies, or writes
over, an earlier one has computed before; a token that the host has not read when it builds the next step is
known on the device by then (UNKNOWN_TOKEN).
Never: loads (startup.py), or computes (model_runner.py and gpu/runner.py).

Shapes: N tokens that are drawn in a step, V vocabulary.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from scheduler.messages import (
    BlockId,
    ModelRunnerOutput,
    NewSequence,
    SchedulerOutput,
    SequenceId,
)
from worker.devices.device import Device
from worker.sampling.row_sampler import PendingSample, RowSampler
from worker.steps.host_pool import HostPool
from worker.steps.model_runner import StepRunner
from worker.steps.plan_changes import apply_changes
from worker.steps.prompt_logprobs import PromptLogprobs, PromptReport
from worker.steps.row_table import RowTable
from worker.steps.step_inputs import StepInputs, build_inputs, check_new_sequence
from worker.worker_config import ModelFacts
from worker.worker_errors import StepOutOfMemory

Result = TypeVar("Result")


class LaunchedStep(Protocol):
    """A step that the device was asked for."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it. To be asked in the order of the launches; asking again gives the same."""


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A LaunchedStep that has nothing left to wait for."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """See LaunchedStep."""
        return self.output


class GenerationSteps:
    """Launches plans, one after another. What is wrong with one sequence fails that sequence alone."""

    def __init__(
        self,
        *,
        device: Device,
        facts: ModelFacts,
        rows: RowTable,
        host_pool: HostPool,
        steps: StepRunner,
        sampler: RowSampler,
    ) -> None:
        self.rows = rows
        self.device = device
        self._host_pool = host_pool
        self._steps = steps
        self._sampler = sampler
        self._vocab_size = facts.vocab_size
        self._prompt_logprobs = PromptLogprobs(facts.vocab_size)
        self._works_ahead = facts.runs_ahead
        self._pending: deque[_PendingStep] = deque()

    def copy_blocks(self, plan: SchedulerOutput) -> dict[BlockId, str]:
        """See Table."""
        return self._host_pool.swap(plan.swap_out, plan.swap_in, plan.copies)

    def add(self, new: NewSequence) -> None:
        """See Table."""
        check_new_sequence(new, self._vocab_size)
        row = self.rows.add(new)
        self._prompt_logprobs.add(new)
        self._sampler.add_row(row, new.params, new.token_ids, new.num_prompt_tokens)

    def release(self, sequence_id: SequenceId) -> None:
        """See Table."""
        self._prompt_logprobs.remove(sequence_id)
        row = self.rows.release(sequence_id)
        if row is not None:
            self._sampler.remove_row(row)

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Ask for a step. Where the device does not work ahead, it is computed when this returns.

        Should it raise, steps that were launched before can still be collected.
        """
        failures: dict[SequenceId, str] = {}
        apply_changes(plan, self, failures)
        inputs = build_inputs(plan, self.rows, failures)
        if inputs is None:
            return ComputedStep(ModelRunnerOutput(token_ids={}, logprobs={}, failures=failures))
        with self._host_pool.step(inputs.metadata):
            logits_NV, prompts = self._compute(inputs)
        failures.update(prompts.failures)
        told = ModelRunnerOutput(
            token_ids={}, logprobs={}, failures=failures, prompt_logprobs=prompts.logprobs
        )
        if not inputs.rows:
            return ComputedStep(told)
        if self._pending and self._sampler.needs_history(inputs.rows):
            # The device is busy with the logits meanwhile.
            for earlier in tuple(self._pending):
                earlier.result()
        sample = self._sampler.begin(logits_NV, inputs.rows)
        if sample.is_news:
            self._steps.remember(sample.token_ids_N)
        step = _PendingStep(inputs, sample, told, self)
        self._pending.append(step)
        if not self._works_ahead:
            step.result()
        return step

    def learn(self, step: "_PendingStep", token_ids: list[int]) -> None:
        """The tokens of a step are known."""
        self.rows.learn_tokens(step.expected, token_ids)

    def forget(self, step: "_PendingStep") -> None:
        """It is not waited for any more."""
        if step in self._pending:
            self._pending.remove(step)

    def describe(self) -> str:
        """See StepRunner.describe."""
        return self._steps.describe()

    def _compute(self, inputs: StepInputs) -> tuple[Tensor, PromptReport]:
        """The logits of the tokens that sample, and what those of prompts tell if somebody asked."""
        wanted = self._prompt_logprobs.wanted(inputs.shares, self.rows)
        if not wanted:
            return self._steps.compute(inputs), PromptReport()
        logits_NV, body = self._steps.compute_keeping_body(inputs)
        return logits_NV, self._prompt_logprobs.report(wanted, body, self._steps)


class _PendingStep:
    """A LaunchedStep whose tokens are being drawn. Collected by whoever needs them first."""

    def __init__(
        self, inputs: StepInputs, sample: PendingSample, told: ModelRunnerOutput, steps: GenerationSteps
    ) -> None:
        """`told` is what is known of the step already: failures, and what was found about prompts."""
        self._sequence_ids = inputs.sequence_ids
        self._sample = sample
        self._told = told
        self._steps = steps
        self._output: ModelRunnerOutput | None = None
        self.expected = steps.rows.expect_tokens(inputs.rows)

    def result(self) -> ModelRunnerOutput:
        """See LaunchedStep."""
        if self._output is None:
            try:
                self._output = telling_out_of_memory(self._steps.device, self._collect)
            finally:
                self._steps.forget(self)
        return self._output

    def _collect(self) -> ModelRunnerOutput:
        result = self._sample.result()
        self._steps.learn(self, result.token_ids)
        if not (result.failed or result.logprobs or self._told.failures):
            tokens = dict(zip(self._sequence_ids, zip(result.token_ids, strict=True), strict=True))
            return replace(self._told, token_ids=tokens)
        failures = dict(self._told.failures)
        for index, reason in result.failed.items():
            failures[self._sequence_ids[index]] = reason
        drawn = [index for index, each in enumerate(self._sequence_ids) if each not in failures]
        return ModelRunnerOutput(
            token_ids={self._sequence_ids[index]: (result.token_ids[index],) for index in drawn},
            logprobs={
                self._sequence_ids[index]: (result.logprobs[index],)
                for index in drawn
                if index in result.logprobs
            },
            failures=failures,
            prompt_logprobs=self._told.prompt_logprobs,
        )


def telling_out_of_memory(device: Device, work: Callable[[], Result]) -> Result:
    """Do it. Raises StepOutOfMemory where the device's memory does not suffice, and makes room first."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
    # Not in the handler: the error holds the frames of the step, and they its tensors.
    device.release_cached_memory()
    raise StepOutOfMemory(reason)
