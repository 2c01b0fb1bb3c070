"""A scheduler, a fake worker and a clock we hold, stepped by hand."""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, LifetimeKind
from scheduler.config import DraftSupply, SchedulerConfig
from scheduler.messages import (
    FinishReason,
    PreemptionCause,
    SchedulerOutput,
    SequenceId,
    SequenceOutput,
    TokenLogprobs,
)
from scheduler.scheduler import Outputs, Scheduler
from scheduler.sequence import Sequence
from tests.fakes import FakeStep, FakeWorker, WorkerExploded, continuation
from tests.invariants import check_invariants, check_plan
from worker.worker_errors import StepOutOfMemory


def windows_of(num_tokens: int | None) -> tuple[CacheGroup, ...]:
    """One group, whose layers have a window, or none."""
    return (CacheGroup(Lifetime(LifetimeKind.WINDOW, num_tokens) if num_tokens else ALL_TOKENS),)


def small_config(**changes: object) -> SchedulerConfig:
    """Small on purpose, so that preemption happens."""
    settings: dict[str, object] = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "watermark": 0.0,
    }
    return SchedulerConfig(**(settings | changes))


@dataclass
class World:
    """Checks the invariants after everything that it does."""

    config: SchedulerConfig
    now_s: float = 0.0
    tokens: dict[SequenceId, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[SequenceId, list[TokenLogprobs]] = field(default_factory=dict)
    ended: dict[SequenceId, SequenceOutput] = field(default_factory=dict)
    max_drafts: int = 0
    """After each result every running sequence is offered up to so many drafts, some of them wrong."""
    compile_steps: int = 1
    """Plans that go by until a grammar that is compiled beside the steps is reported."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        config = self.config
        self.worker = FakeWorker(config.block_size, config.groups, config.encoder_cache_tokens)
        self._late: deque[tuple[SchedulerOutput, FakeStep]] = deque()
        self._compiling: deque[tuple[int, SequenceId]] = deque()
        self._compiled: set[SequenceId] = set()
        self.num_plans = 0

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.scheduler.add_request(seq, now_s=self.now_s)
            self.tokens[seq.sequence_id] = []
            self.prompt_logprobs[seq.sequence_id] = []
            self.worker.inputs[seq.sequence_id] = seq.encoder_inputs
        check_invariants(self.scheduler)

    def step(self, *, abort_meanwhile: int | None = None) -> SchedulerOutput:
        """Plan and compute; results are learnt as late as the number of plans in flight allows.

        `abort_meanwhile` ends a sequence while the worker computes, as the loop may.
        """
        plan = self.scheduler.schedule(now_s=self.now_s)
        check_plan(self.scheduler, plan)
        self._compile(plan)
        if plan.is_empty:
            self._take(self.scheduler.take_outputs())
            if self._late:
                self.learn()
        else:
            self._launch(plan)
            while self._late and not self.scheduler.can_schedule:
                self.learn(abort_meanwhile=abort_meanwhile)
        self.now_s += 1.0
        check_invariants(self.scheduler)
        return plan

    def _compile(self, plan: SchedulerOutput) -> None:
        """The worker's thread: a row is compiled once for each admission, and none is left over."""
        if not self.config.max_compiling_s:
            return
        compilations = self.scheduler.compilations
        bound = {new.sequence_id for new in plan.new_sequences if new.params.grammar is not None}
        assert bound <= self._compiled, "admitted before its grammar was compiled"
        assert bound == {*compilations.take_used()}
        self._compiled -= bound
        self._compiled -= {*compilations.take_unused()}
        self._compiling += [(self.num_plans, seq.sequence_id) for seq in compilations.take_begun()]
        begun = {sequence_id for _, sequence_id in self._compiling}
        assert begun >= {*compilations.take_left()}, "given up, and never begun"
        assert compilations.num_under_way == len(self._compiling)
        self.num_plans += 1
        while self._compiling and self._compiling[0][0] + self.compile_steps <= self.num_plans:
            sequence_id = self._compiling.popleft()[1]
            if self.scheduler.note_compiled(sequence_id):
                self._compiled.add(sequence_id)

    def learn(self, *, abort_meanwhile: int | None = None) -> None:
        """The result of the oldest plan in flight."""
        plan, launched = self._late.popleft()
        try:
            result = launched.result()
        except StepOutOfMemory:
            self._take_back()
            return
        except WorkerExploded:
            self._take(self.scheduler.fail_step(plan, "the worker failed"))
            alive = self.scheduler.running_sequences() + self.scheduler.waiting_sequences()
            lost = {seq.sequence_id for seq in alive} & self.worker.lost
            lost -= self.worker.poisoned | self.worker.silent  # of these, the results tell
            assert self.worker.is_in_doubt or not lost, "what was never computed lives on"
            return
        if abort_meanwhile is not None and not result.failures:
            self.abort(abort_meanwhile)
        self.scheduler.observe_step(plan, plan.num_scheduled_tokens * 0.05)
        self._take(self.scheduler.update_from_output(plan, result))
        self.scheduler.update_draft_token_ids(self._drafts(plan))

    def learn_all(self) -> None:
        while self._late:
            self.learn()
        check_invariants(self.scheduler)

    def _launch(self, plan: SchedulerOutput) -> None:
        """Launch a plan; none is planned behind one that could not even begin."""
        try:
            self._late.append((plan, self.worker.launch(plan)))
        except StepOutOfMemory:
            self.learn_all()
            if self.scheduler._in_flight:  # else it was taken back with an earlier one
                self._take_back()

    def _take_back(self) -> None:
        while self._late:
            with suppress(StepOutOfMemory, WorkerExploded):
                self._late.popleft()[1].result()
        self._take(self.scheduler.roll_back("too little memory"))

    def _drafts(self, plan: SchedulerOutput) -> dict[SequenceId, tuple[int, ...]]:
        if self.config.draft_supply is DraftSupply.ASKED:
            wanted = plan.num_drafts_wanted
        else:
            wanted = dict.fromkeys(self.tokens, self.max_drafts)
        return {
            seq.sequence_id: guesses(seq.token_ids, wanted[seq.sequence_id])
            for seq in self.scheduler.running_sequences()
            if wanted.get(seq.sequence_id) and len(seq.token_ids) % 5
        }

    def abort(self, *ids: int) -> None:
        self.scheduler.finish_requests([SequenceId(i) for i in ids], FinishReason.ABORTED)
        self._take(self.scheduler.take_outputs())
        check_invariants(self.scheduler)

    def run(self, max_steps: int = 1000) -> int:
        """Until nothing is left; returns the number of steps."""
        for step in range(max_steps):
            if not self.scheduler.has_unfinished_requests:
                self.learn_all()
                return step
            self.step()
        raise AssertionError(f"still unfinished after {max_steps} steps")

    def num_preemptions(self, *causes: PreemptionCause) -> int:
        """For these causes; for all of them, if none is named."""
        counts = self.scheduler.stats().num_preemptions
        return sum(num for (cause, _), num in counts.items() if cause in (causes or PreemptionCause))

    def num_swaps(self) -> int:
        counts = self.scheduler.stats().num_preemptions
        return sum(num for (_, was_swapped), num in counts.items() if was_swapped)

    def reason(self, sequence_id: int) -> FinishReason | None:
        return self.ended[SequenceId(sequence_id)].finish_reason

    def _take(self, outputs: Outputs) -> None:
        for output in (output for per_client in outputs.values() for output in per_client):
            assert output.sequence_id not in self.ended, "news of a sequence that has ended"
            assert len(output) == len(SequenceOutput._fields), "made without its constructor"
            self.tokens[output.sequence_id].extend(output.token_ids)
            self.prompt_logprobs[output.sequence_id].extend(output.prompt_logprobs)
            if output.finish_reason is not None:
                self.ended[output.sequence_id] = output


def shares(plan: SchedulerOutput) -> dict[int, int]:
    """Tokens of each sequence in a plan."""
    return {share.sequence_id: share.num_tokens for share in plan.scheduled}


def guesses(token_ids: list[int], most: int) -> tuple[int, ...]:
    """At what follows: right up to some place, which depends on the tokens; then wrong."""
    num_guesses = 1 + sum(token_ids) % most
    num_right = sum(token_ids[-2:]) % (num_guesses + 1)
    right = continuation(token_ids, num_guesses)
    return tuple(token if place < num_right else token + 1 for place, token in enumerate(right))
