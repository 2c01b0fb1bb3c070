"""The worker: one model on one device, which does what a plan says and decides nothing.

Owns: the order of a step: release, swap, add, grow, compute, draw. Loading is startup.py's.
Never: chooses what is computed (scheduler/), or knows of requests, text or clients.
"""

from collections.abc import Callable

from scheduler.messages import (
    BlockId,
    ModelRunnerOutput,
    NewSequence,
    SchedulerOutput,
    SequenceId,
)
from worker.config import LoadProgress, ModelFacts, WorkerConfig
from worker.device import Device, open_device
from worker.errors import SequenceRefused
from worker.inputs import build_inputs, check_new_sequence
from worker.progress import run_reporting
from worker.rows import RowTable
from worker.sampler import Sampler
from worker.startup import ReadyModel, start


class _Served:
    """Everything that exists once a model is loaded."""

    def __init__(self, config: WorkerConfig, device: Device, ready: ReadyModel) -> None:
        facts = ready.facts
        self.device = device
        self.host_pool = ready.host_pool
        self.runner = ready.runner
        self.backend = ready.backend
        self.vocab_size = facts.vocab_size
        self.sampler = Sampler(vocab_size=facts.vocab_size, device=device.torch_device)
        self.rows = RowTable(
            max_num_seqs=config.max_num_seqs,
            max_model_len=facts.max_model_len,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
        )


class Worker:
    """Load once, then execute plans one after another. Not for several threads."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._served: _Served | None = None

    def load(self, report: Callable[[LoadProgress], None]) -> ModelFacts:
        """Load the weights, measure memory, allocate the KV cache, warm up.

        `report` is called in this thread, at least every half second. Raises StartupError with one
        line that says what is wrong and what to do.
        """
        # Here and not in the loading thread: the number of compute threads is set for each thread.
        device = open_device(self._config)
        ready = run_reporting(lambda stage: start(self._config, device, stage), report)
        self._served = _Served(self._config, device, ready)
        return ready.facts

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Do one step. What is wrong with one sequence fails that sequence; the others go on."""
        assert self._served is not None, "execute comes after load and before close"
        served = self._served
        failures: dict[SequenceId, str] = {}
        _apply_changes(plan, served, failures)
        inputs = build_inputs(plan, served.rows, served.device, failures)
        if inputs is None:
            return ModelRunnerOutput(token_ids={}, logprobs={}, failures=failures)
        logits_NV = served.runner.run(inputs, served.backend)
        if not inputs.rows:
            return ModelRunnerOutput(token_ids={}, logprobs={}, failures=failures)
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
        )

    def close(self) -> None:
        """Let go of the model and the cache; their memory returns when nobody else holds them."""
        self._served = None


def _apply_changes(plan: SchedulerOutput, served: _Served, failures: dict[SequenceId, str]) -> None:
    for sequence_id in plan.released:
        _release(sequence_id, served)
    # Before anything else is written: blocks that go out may belong to others from this step on.
    lost_blocks = served.host_pool.swap(plan.swap_out, plan.swap_in)
    for new in plan.new_sequences:
        # A step that failed half-way may have left a row behind.
        _release(new.sequence_id, served)
        try:
            _check_swapped_in(new, lost_blocks)
            _add(new, served)
        except SequenceRefused as error:
            failures[new.sequence_id] = str(error)
    for sequence_id, block_ids in plan.new_blocks.items():
        try:
            served.rows.grow(sequence_id, block_ids)
        except SequenceRefused as error:
            failures.setdefault(sequence_id, str(error))


def _add(new: NewSequence, served: _Served) -> None:
    check_new_sequence(new, served.vocab_size)
    row = served.rows.add(new)
    served.sampler.add_row(row, new.params, new.token_ids, new.num_prompt_tokens)


def _check_swapped_in(new: NewSequence, lost_blocks: dict[BlockId, str]) -> None:
    """Raise SequenceRefused for a sequence whose keys and values did not come back."""
    for block_id in new.block_ids if lost_blocks else ():
        if block_id in lost_blocks:
            raise SequenceRefused(f"block {block_id}: {lost_blocks[block_id]}")


def _release(sequence_id: SequenceId, served: _Served) -> None:
    row = served.rows.release(sequence_id)
    if row is not None:
        served.sampler.remove_row(row)
