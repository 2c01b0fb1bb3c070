"""The worker: one model on one device, which does what a plan says and decides nothing.

Owns: the order of a step: release, swap, copy, add, grow, compute, draw. Loading is startup.py's.
Never: chooses what is computed (scheduler/), or knows of requests, text or clients.
"""

from collections.abc import Callable

from torch import Tensor

from scheduler.messages import (
    BlockId,
    ModelRunnerOutput,
    NewSequence,
    SchedulerOutput,
    SequenceId,
)
from worker.changes import apply_changes
from worker.checkpoint import find_checkpoint
from worker.config import LoadProgress, ModelFacts, WorkerConfig
from worker.device import Device, open_device
from worker.grammar import Grammars
from worker.inputs import StepInputs, build_inputs, check_new_sequence
from worker.loader import find_kind
from worker.model_runner import ModelRunner
from worker.pooling_startup import start_pooling
from worker.pooling_step import PoolingSteps
from worker.progress import LoadStage, run_reporting
from worker.prompt_logprobs import PromptLogprobs, PromptReport
from worker.rows import RowTable
from worker.sampler import Sampler
from worker.startup import ReadyModel, start
from worker.task import Task


class _Served:
    """Everything that exists once a model is loaded."""

    def __init__(self, config: WorkerConfig, device: Device, ready: ReadyModel[ModelRunner]) -> None:
        facts = ready.facts
        self.device = device
        self.host_pool = ready.host_pool
        self.runner = ready.runner
        self.backend = ready.backend
        self.vocab_size = facts.vocab_size
        grammars = Grammars(
            find_checkpoint(config.model_path),
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
        )
        self.sampler = Sampler(vocab_size=facts.vocab_size, device=device.torch_device, grammars=grammars)
        self.prompt_logprobs = PromptLogprobs(facts.vocab_size)
        self.rows = RowTable(
            max_num_seqs=config.max_num_seqs,
            max_model_len=facts.max_model_len,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            sliding_window=facts.sliding_window,
        )

    def copy_blocks(self, plan: SchedulerOutput) -> dict[BlockId, str]:
        """See Table."""
        return self.host_pool.swap(plan.swap_out, plan.swap_in, plan.copies)

    def add(self, new: NewSequence) -> None:
        """See Table."""
        check_new_sequence(new, self.vocab_size)
        row = self.rows.add(new)
        self.prompt_logprobs.add(new)
        self.sampler.add_row(row, new.params, new.token_ids, new.num_prompt_tokens)

    def release(self, sequence_id: SequenceId) -> None:
        """See Table."""
        self.prompt_logprobs.remove(sequence_id)
        row = self.rows.release(sequence_id)
        if row is not None:
            self.sampler.remove_row(row)


class Worker:
    """Load once, then execute plans one after another. Not for several threads."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._served: _Served | None = None
        self._pooling: PoolingSteps | None = None

    def load(self, report: Callable[[LoadProgress], None]) -> ModelFacts:
        """Load the weights, measure memory, allocate the KV cache, warm up.

        `report` is called in this thread, at least every half second. Raises StartupError with one
        line that says what is wrong and what to do.
        """
        # Here and not in the loading thread: the number of compute threads is set for each thread.
        device = open_device(self._config)
        return run_reporting(lambda stage: self._start(device, stage), report)

    def _start(self, device: Device, stage: LoadStage) -> ModelFacts:
        kind = find_kind(self._config)
        if kind.task is not Task.GENERATE:
            facts, self._pooling = start_pooling(self._config, kind, device, stage)
            return facts
        ready = start(self._config, kind, device, stage)
        self._served = _Served(self._config, device, ready)
        return ready.facts

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Do one step. What is wrong with one sequence fails that sequence; the others go on."""
        if self._pooling is not None:
            return self._pooling.execute(plan)
        assert self._served is not None, "execute comes after load and before close"
        served = self._served
        failures: dict[SequenceId, str] = {}
        apply_changes(plan, served, failures)
        inputs = build_inputs(plan, served.rows, served.device, failures)
        if inputs is None:
            return ModelRunnerOutput(token_ids={}, logprobs={}, failures=failures)
        logits_NV, prompts = _compute(inputs, served)
        failures.update(prompts.failures)
        if not inputs.rows:
            return ModelRunnerOutput(
                token_ids={}, logprobs={}, failures=failures, prompt_logprobs=prompts.logprobs
            )
        result = served.sampler.sample(logits_NV, inputs.rows)
        for index, reason in result.failed.items():
            failures[inputs.sequence_ids[index]] = reason
        drawn = [index for index, each in enumerate(inputs.sequence_ids) if each not in failures]
        served.rows.append_tokens(
            [inputs.rows[index] for index in drawn], [result.token_ids[index] for index in drawn]
        )
        return ModelRunnerOutput(
            token_ids={inputs.sequence_ids[index]: (result.token_ids[index],) for index in drawn},
            logprobs={
                inputs.sequence_ids[index]: (result.logprobs[index],)
                for index in drawn
                if index in result.logprobs
            },
            failures=failures,
            prompt_logprobs=prompts.logprobs,
        )

    def close(self) -> None:
        """Let go of the model and the cache; their memory returns when nobody else holds them."""
        self._served = self._pooling = None


def _compute(inputs: StepInputs, served: _Served) -> tuple[Tensor, PromptReport]:
    """The logits of the tokens that sample, and what those of prompts tell if somebody asked."""
    wanted = served.prompt_logprobs.wanted(inputs.shares, served.rows)
    if not wanted:
        return served.runner.run(inputs, served.backend), PromptReport()
    logits_NV, body = served.runner.run_keeping_body(inputs, served.backend)
    return logits_NV, served.prompt_logprobs.report(wanted, inputs, body, served.runner)
