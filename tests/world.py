"""A scheduler, a fake worker and a clock we hold, stepped by hand."""

from dataclasses import dataclass, field

from scheduler.config import SchedulerConfig
from scheduler.invariants import check_invariants, check_plan
from scheduler.messages import FinishReason, PreemptionCause, SchedulerOutput, SequenceId, SequenceOutput
from scheduler.scheduler import Outputs, Scheduler
from scheduler.sequence import Sequence
from tests.fakes import FakeWorker, WorkerExploded


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
    ended: dict[SequenceId, SequenceOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.worker = FakeWorker(self.config.block_size)

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.scheduler.add_request(seq, now_s=self.now_s)
            self.tokens[seq.sequence_id] = []
        check_invariants(self.scheduler)

    def step(self, *, abort_meanwhile: int | None = None) -> SchedulerOutput:
        """`abort_meanwhile` ends a sequence while the worker computes, as the loop may."""
        plan = self.scheduler.schedule(now_s=self.now_s)
        check_plan(self.scheduler, plan)
        if plan.is_empty:
            self._take(self.scheduler.take_outputs())
        else:
            try:
                result = self.worker.execute(plan)
            except WorkerExploded:
                self._take(self.scheduler.fail_step(plan, "the worker failed"))
            else:
                if abort_meanwhile is not None and not result.failures:
                    self.abort(abort_meanwhile)
                self.scheduler.observe_step(plan, plan.num_scheduled_tokens * 0.05)
                self._take(self.scheduler.update_from_output(plan, result))
        self.now_s += 1.0
        check_invariants(self.scheduler)
        return plan

    def abort(self, *ids: int) -> None:
        self.scheduler.finish_requests([SequenceId(i) for i in ids], FinishReason.ABORTED)
        self._take(self.scheduler.take_outputs())
        check_invariants(self.scheduler)

    def run(self, max_steps: int = 1000) -> int:
        """Until nothing is left; returns the number of steps."""
        for step in range(max_steps):
            if not self.scheduler.has_unfinished_requests:
                return step
            self.step()
        raise AssertionError(f"still unfinished after {max_steps} steps")

    def num_preemptions(self, *causes: PreemptionCause) -> int:
        """For these causes; for all of them, if none is named."""
        counts = self.scheduler.stats().preemptions
        return sum(count.num for count in counts if count.cause in (causes or PreemptionCause))

    def num_swaps(self) -> int:
        return sum(count.num for count in self.scheduler.stats().preemptions if count.was_swapped)

    def reason(self, sequence_id: int) -> FinishReason | None:
        return self.ended[SequenceId(sequence_id)].finish_reason

    def _take(self, outputs: Outputs) -> None:
        for output in (output for per_client in outputs.values() for output in per_client):
            assert output.sequence_id not in self.ended, "news of a sequence that has ended"
            self.tokens[output.sequence_id].extend(output.token_ids)
            if output.finish_reason is not None:
                self.ended[output.sequence_id] = output


def shares(plan: SchedulerOutput) -> dict[int, int]:
    """Who got how many tokens."""
    return {share.sequence_id: share.num_tokens for share in plan.scheduled}
