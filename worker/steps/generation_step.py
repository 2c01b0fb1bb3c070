"""Steps of a model that generates tokens.

Owns: the order of a step: release, swap, copy, add, grow, compute, sample; and the collection of launched
steps. On a device that works ahead, a launch asks for all of this and waits for none of it:

    launch(1)   launch(2)   1.result()   launch(3)   2.result()

The device carries steps out in the order of their launches. An earlier step is computed before a later one
copies or overwrites its blocks. A token that the host has not read when it builds the next step is known on
the device by then (UNKNOWN_TOKEN).

Shapes: N tokens that are sampled in a step, V vocabulary.
"""

from collections import deque
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from scheduler.messages import (
    BlockId,
    Encoded,
    ModelRunnerOutput,
    NewSequence,
    SchedulerOutput,
    SequenceId,
)
from worker.adapters.store import AdapterStore
from worker.devices.device import Device
from worker.sampling.row_sampler import PendingSample, RowSampler
from worker.speculation.drafter import Drafter
from worker.steps.draft_model import NOTHING_MADE, DraftModel, DraftSizes, HiddenStatesKept
from worker.steps.host_pool import HostPool
from worker.steps.inputs import StepInputs, build_inputs, check_new_sequence
from worker.steps.model_runner import StepRunner
from worker.steps.pictures import Pictures
from worker.steps.prompt_logprobs import PromptReport, PromptScorer
from worker.steps.protocol import ComputedStep, LaunchedStep, naming_out_of_memory
from worker.steps.row_table import RowTable
from worker.steps.sequence_table import add_row, apply_changes
from worker.worker_config import ModelFacts, SpeculationConfig


class GenerationSteps:
    """A SequenceTable, and steps that sample tokens. An error in one sequence fails that sequence alone."""

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
        self.grammars = sampler.compile_ahead
        self._drafter: Drafter | None = None
        self._draft_model: DraftModel | None = None
        self.adapters: AdapterStore | None = None
        self._pictures: Pictures | None = None
        self._vocab_size = facts.vocab_size
        self._prompt_logprobs = PromptScorer(facts.vocab_size)
        self._works_ahead = facts.runs_ahead
        self._pending: deque[_PendingStep] = deque()

    def speculate(self, config: SpeculationConfig) -> None:
        """Propose drafts after each step from now on."""
        self._drafter = Drafter(config)

    def speculate_with(
        self, draft_steps: StepRunner, sizes: DraftSizes, kept: HiddenStatesKept | None
    ) -> None:
        """Let a draft model make drafts where plans ask for them.

        `kept` is for the hidden states of all steps, which a head of the model reads.
        """
        self._draft_model = DraftModel(draft_steps, self.rows, self._sampler, sizes, kept)

    def adapt(self, adapters: AdapterStore) -> None:
        """Compute with adapters from now on."""
        self.adapters = adapters

    def see(self, pictures: Pictures) -> None:
        """Compute prompts with pictures from now on."""
        self._pictures = pictures

    def copy_blocks(self, plan: SchedulerOutput) -> dict[BlockId, str]:
        if self._draft_model is not None:
            self._draft_model.move_blocks(plan)
        return self._host_pool.swap(plan.swap_out, plan.swap_in, plan.copies)

    def add(self, new: NewSequence) -> None:
        check_new_sequence(new, self._vocab_size)
        if self._pictures is not None:
            self._pictures.add(new)
        row = add_row(self.rows, self.adapters, new)
        self._prompt_logprobs.add(new)
        self._sampler.add_row(row, new.params, new.token_ids, new.num_prompt_tokens)
        if self._drafter is not None:
            self._drafter.add(row, new)

    def release(self, sequence_id: SequenceId) -> None:
        self._prompt_logprobs.remove(sequence_id)
        if self._pictures is not None:
            self._pictures.release(sequence_id)
        row = self.rows.row_of(sequence_id)
        if row is not None:
            if self._drafter is not None:
                self._drafter.remove(row, self.rows.known_tokens_of(row))
            if self._draft_model is not None:
                self._draft_model.remove(row)
            if self.adapters is not None:
                self.adapters.unseat(row)
            self.rows.release(sequence_id)
            self._sampler.remove_row(row)

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """See Steps. On a device that does not work ahead, the step is computed when this returns."""
        failures: dict[SequenceId, str] = {}
        apply_changes(plan, self, failures)
        if self._pictures is None or not plan.encoder_inputs:
            return self._launch(plan, failures)
        # Before the step: of one that a device computes later, the tokens would come after the slice.
        encoded = self._pictures.encode(plan, failures)
        return _StepWithPictures(self._launch(plan, failures), encoded)

    def _launch(self, plan: SchedulerOutput, failures: dict[SequenceId, str]) -> LaunchedStep:
        # Ranks that wait for tokens need them for the passes behind the step.
        asks_all = plan.num_drafts_wanted and self._sampler.is_shared and self._draft_model is not None
        if plan.draft_token_ids or asks_all:
            return ComputedStep(self.propose(self._verify(plan, failures), plan))
        inputs = build_inputs(plan, self.rows, failures)
        if inputs is None:
            return ComputedStep(ModelRunnerOutput(token_ids={}, logprobs={}, failures=failures))
        with self._host_pool.step(inputs.metadata):
            logits_NV, prompts = self._compute(inputs)
        failures.update(prompts.failures)
        known = ModelRunnerOutput(
            token_ids={}, logprobs={}, failures=failures, prompt_logprobs=prompts.logprobs
        )
        if not inputs.rows:
            return ComputedStep(known)
        if self._pending and self._sampler.needs_history(inputs.rows):
            self._collect_all()  # meanwhile the device computes the logits
        sample = self._sampler.begin(logits_NV, inputs.rows)
        if sample.is_new:
            self._steps.remember(sample.token_ids_N)
        step = _PendingStep(inputs, sample, known, plan, self)
        self._pending.append(step)
        if not self._works_ahead:
            step.result()
        return step

    def learn(self, step: "_PendingStep", token_ids: list[int]) -> None:
        """Record the tokens of a step in their rows."""
        self.rows.learn_tokens(step.expected, token_ids)

    def forget(self, step: "_PendingStep") -> None:
        """Stop tracking a step that was collected."""
        if step in self._pending:
            self._pending.remove(step)

    def describe(self) -> str:
        return self._steps.describe()

    def _verify(self, plan: SchedulerOutput, failures: dict[SequenceId, str]) -> ModelRunnerOutput:
        """Compute and sample a step some of whose shares have drafts, or get some. Waits for the device.

        Where steps are in flight, their tokens are read first: each token of the step is known to the host.
        """
        self._collect_all()
        held = self.rows.hold_all_drafts(plan.draft_token_ids, self._vocab_size, failures)
        try:
            inputs = build_inputs(plan, self.rows, failures)
            if inputs is None:
                return ModelRunnerOutput(token_ids={}, logprobs={}, failures=failures)
            with self._host_pool.step(inputs.metadata):
                logits_NV, prompts = self._compute(inputs)
        finally:
            for row, drafts in held.items():
                self.rows.drop_drafts(row, len(drafts))
        failures.update(prompts.failures)
        verified = self._sampler.verify(logits_NV, inputs.rows, [held.get(row, ()) for row in inputs.rows])
        num_right = {
            sequence_id: len(found.token_ids) - 1
            for sequence_id, found in zip(inputs.sequence_ids, verified, strict=True)
            if found.token_ids
        }
        self._steps.accept_drafts([num_right.get(share.sequence_id, 0) for share in inputs.shares])
        token_ids: dict[SequenceId, tuple[int, ...]] = {}
        unfit: dict[SequenceId, str] = {}
        logprobs = {}
        for sequence_id, row, found in zip(inputs.sequence_ids, inputs.rows, verified, strict=True):
            self.rows.extend(row, found.token_ids)
            if found.failure:
                (unfit if found.is_unfit else failures)[sequence_id] = found.failure
            elif sequence_id not in failures:
                token_ids[sequence_id] = found.token_ids
                if found.logprobs:
                    logprobs[sequence_id] = found.logprobs
        return ModelRunnerOutput(
            token_ids=token_ids,
            logprobs=logprobs,
            failures=failures,
            unfit=unfit,
            prompt_logprobs=prompts.logprobs,
        )

    def _collect_all(self) -> None:
        for earlier in tuple(self._pending):
            earlier.result()

    def propose(self, output: ModelRunnerOutput, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Add drafts of what follows the sampled tokens to the output of a step."""
        if (self._drafter is None or self._drafter.is_idle) and not plan.num_drafts_wanted:
            return output
        made = NOTHING_MADE
        if self._draft_model is not None and plan.num_drafts_wanted:
            wanted = {each: num for each, num in plan.num_drafts_wanted.items() if each in output.token_ids}
            made = self._draft_model.propose(wanted)
        drafts = {}
        rows = {each: row for each in output.token_ids if (row := self.rows.row_of(each)) is not None}
        hopeless: set[int] = set()
        if self._drafter is not None and not self._works_ahead:
            hopeless = self._drafter.hopeless(
                [*rows.values()], self.rows.token_ids_CL, self.rows.num_tokens_C
            )
        for sequence_id, row in rows.items():
            guess = made.drafts.get(sequence_id, ())
            if not guess and self._drafter is not None and row not in hopeless:
                tokens = self.rows.known_tokens_of(row)
                guess = self._drafter.propose(row, tokens, num_rows=len(rows))
            if guess and (possible := self._sampler.possible_drafts(row, guess)):
                drafts[sequence_id] = possible
        if not drafts and made is NOTHING_MADE:
            return output
        return replace(
            output, draft_token_ids=drafts, draft_passes=made.passes, num_followed=made.num_followed
        )

    def _compute(self, inputs: StepInputs) -> tuple[Tensor, PromptReport]:
        """Compute the logits of the tokens that sample, and log-probabilities of prompts if asked."""
        if self.adapters is not None:
            self.adapters.begin_step(inputs.rows_T)
        if self._pictures is None:
            return self._compute_placed(inputs)
        computed = self._compute_placed(self._pictures.place(inputs))
        self._pictures.note_computed(inputs.shares)
        return computed

    def _compute_placed(self, inputs: StepInputs) -> tuple[Tensor, PromptReport]:
        wanted = self._prompt_logprobs.wanted(inputs.shares, self.rows)
        outcome = self._steps.compute(replace(inputs, keeps_hidden=True) if wanted else inputs)
        if self._draft_model is not None:
            self._draft_model.follow(inputs, outcome.hidden)
        if not wanted:
            return outcome.logits_NV, PromptReport()
        assert outcome.hidden is not None
        report = PromptReport()
        self._prompt_logprobs.report(wanted, partial(self._steps.head, outcome.hidden), report)
        return outcome.logits_NV, report


@dataclass(frozen=True, slots=True)
class _StepWithPictures:
    """A LaunchedStep before which pictures were encoded."""

    step: LaunchedStep
    encoded: Encoded

    @property
    def sampled(self) -> list[int]:
        return self.step.sampled

    def result(self) -> ModelRunnerOutput:
        return replace(self.step.result(), encoded=self.encoded)


class _PendingStep:
    """A LaunchedStep whose tokens are being sampled. Collected by the engine, or by a later step."""

    def __init__(
        self,
        inputs: StepInputs,
        sample: PendingSample,
        known: ModelRunnerOutput,
        plan: SchedulerOutput,
        steps: GenerationSteps,
    ) -> None:
        """Take in `known`, the output that needs no sample: failures and log-probabilities of prompts."""
        self._plan = plan
        self._sequence_ids = inputs.sequence_ids
        self._sample = sample
        self._known = known
        self._steps = steps
        self._output: ModelRunnerOutput | None = None
        self.sampled: list[int] = []
        self.expected = steps.rows.expect_tokens(inputs.rows)

    def result(self) -> ModelRunnerOutput:
        if self._output is None:
            try:
                self._output = naming_out_of_memory(
                    self._steps.device, lambda: self._steps.propose(self._collect(), self._plan)
                )
            finally:
                self._steps.forget(self)
        return self._output

    def _collect(self) -> ModelRunnerOutput:
        result = self._sample.result()
        self.sampled = result.token_ids
        self._steps.learn(self, result.token_ids)
        if not (result.failed or result.logprobs or self._known.failures):
            tokens = dict(zip(self._sequence_ids, zip(result.token_ids, strict=True), strict=True))
            return replace(self._known, token_ids=tokens)
        failures, unfit = dict(self._known.failures), dict[SequenceId, str]()
        for index, reason in result.failed.items():
            (unfit if index in result.unfit else failures)[self._sequence_ids[index]] = reason
        ended = {*failures, *unfit}
        sampled = [index for index, each in enumerate(self._sequence_ids) if each not in ended]
        return ModelRunnerOutput(
            token_ids={self._sequence_ids[index]: (result.token_ids[index],) for index in sampled},
            logprobs={
                self._sequence_ids[index]: (result.logprobs[index],)
                for index in sampled
                if index in result.logprobs
            },
            failures=failures,
            unfit=unfit,
            prompt_logprobs=self._known.prompt_logprobs,
        )
