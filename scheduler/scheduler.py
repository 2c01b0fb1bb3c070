"""Who computes how many tokens in the next step.

Owns: the life of every sequence, from add_request to its one last output.
Never: tensors, clocks, tasks. `schedule` decides (planner.py), `update_from_output` learns what came of it.
Sources: continuous batching (Orca), chunked prefill (Sarathi-Serve, arXiv:2403.02310), paged KV
(arXiv:2309.06180).
"""

from collections.abc import Iterable
from operator import attrgetter

from scheduler.config import SchedulerConfig
from scheduler.counters import Counters
from scheduler.deadlines import Deadlines
from scheduler.fairness import (
    GENERATED_TOKEN_COST,
)
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.lines import Lines
from scheduler.messages import (
    FinishReason,
    ModelRunnerOutput,
    RequestCounts,
    SchedulerOutput,
    SchedulerStats,
    SequenceId,
    SequenceOutput,
    SequenceReport,
)
from scheduler.plan_draft import PlanDraft
from scheduler.planner import Planner
from scheduler.policy import rank_of
from scheduler.reports import report_on
from scheduler.sequence import Sequence, Status
from scheduler.swap_space import SwapSpace
from scheduler.watchdog import Watchdog

_rank_of = attrgetter("rank")

# How far behind a head that does not fit it is looked for one that does.
_BYPASS_WINDOW = 8

Outputs = dict[int, list[SequenceOutput]]
"""By client_index."""


class NeverFits(Exception):
    """The sequence would need more than there is, whatever is freed. Its text is for the caller."""


class Scheduler:
    """One step: `schedule`, then `update_from_output` with what the worker made of it.

    Every added sequence ends with exactly one output that carries a finish reason.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVCacheManager(config)
        self._rank = rank_of(config)
        self._sequences: dict[SequenceId, Sequence] = {}
        self._lines = Lines(config)
        self._released: list[SequenceId] = []  # rows that the worker may free, told with the next plan
        self._outputs: Outputs = {}
        self._deadlines = Deadlines()
        self._watchdog = Watchdog()
        self._counters = Counters()
        self._planner = Planner(config, self.kv, self._lines, counters=self._counters, finish=self._finish)

    # The public calls.

    def add_request(self, seq: Sequence, *, now_s: float) -> None:
        """Queue one sequence; a request with n > 1 adds n of them, which share their prompt's blocks.

        Raises NeverFits if it cannot be served even alone, ValueError if its id is in use; the
        scheduler is then as if it had not been called.
        """
        if seq.sequence_id in self._sequences:
            raise ValueError(f"sequence {seq.sequence_id} exists already")
        self._refuse_what_never_fits(seq)
        self._counters.num_added += 1
        seq.admission = self._counters.num_added
        seq.admitted_s = now_s
        seq.rank = self._rank(seq)
        self._sequences[seq.sequence_id] = seq
        self._lines.add(seq)
        self._deadlines.add(seq)

    def schedule(self, *, now_s: float) -> SchedulerOutput:
        """Plan the next step. The plan counts as computed from now on; results only add tokens."""
        for seq, limit in self._deadlines.expired(now_s=now_s):
            self._finish(seq, FinishReason.EXPIRED, message=limit.value)
        return self._close(self._planner.plan(now_s=now_s))

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> Outputs:
        """Take in what the worker drew. Sequences that ended while it ran are passed over."""
        for share in plan.scheduled:
            seq = self._sequences.get(share.sequence_id)
            if seq is None or seq.status is not Status.RUNNING:
                continue
            token_ids = result.token_ids.get(share.sequence_id)
            if token_ids:
                self._take_tokens(seq, token_ids, result)
            elif share.samples or share.sequence_id in result.failures:
                # A silent worker counts as a failed one: the sequence could never be scheduled again.
                self.kv.forget(seq)
                message = result.failures.get(share.sequence_id, "the model returned no token")
                self._finish(seq, FinishReason.FAILED, message=message)
        return self.take_outputs()

    def fail_step(self, plan: SchedulerOutput, message: str) -> Outputs:
        """The worker failed on the whole plan: everyone in it fails, nobody else does."""
        for share in plan.scheduled:
            seq = self._sequences.get(share.sequence_id)
            if seq is not None:
                self.kv.forget(seq)
                self._finish(seq, FinishReason.FAILED, message=message)
        for preemption in plan.preemptions:  # whether their copies were made, nobody knows
            seq = self._sequences.get(preemption.sequence_id)
            if seq is not None and seq.status is Status.SWAPPED:
                self._planner.preemptor.drop(seq)
                self._lines.lose_copy(seq)
        return self.take_outputs()

    def finish_requests(self, sequence_ids: Iterable[SequenceId], reason: FinishReason) -> None:
        """End these now, wherever they are; ids that are unknown or ended already are passed over."""
        for sequence_id in sequence_ids:
            seq = self._sequences.get(sequence_id)
            if seq is not None:
                self._finish(seq, reason)

    def reset_prefix_cache(self) -> None:
        """Let nothing that was cached so far be found again; running sequences keep their blocks."""
        self.kv.prefix_cache.clear()

    def take_outputs(self) -> Outputs:
        """What was not delivered yet, for steps that had nothing to compute."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def get_request_counts(self) -> RequestCounts:
        return self._lines.counts()

    def observe_step(self, plan: SchedulerOutput, seconds: float) -> None:
        """How long the worker took for a plan; what follows is decided by such figures."""
        self._planner.step_time.observe(
            plan.num_scheduled_tokens, seconds, has_prefill=plan.num_scheduled_tokens > len(plan.scheduled)
        )

    def report(self, *, now_s: float) -> list[SequenceReport]:
        """Every live sequence, and why it waits."""
        waiting = list(self._lines.waiting)
        return report_on(self._lines.running, waiting, self._planner.wait_reason, now_s=now_s)

    def tenant_service(self) -> dict[str, float]:
        """What each tenant had so far, by cost; empty without fairness."""
        return self._lines.tenant_service()

    @property
    def swap_space(self) -> SwapSpace:
        return self._planner.preemptor.swap_space

    def running_sequences(self) -> list[Sequence]:
        """In the order in which they are served; the sequences themselves are not copies."""
        return list(self._lines.running)

    def waiting_sequences(self) -> list[Sequence]:
        """Swapped ones too; in no particular order."""
        return list(self._lines.waiting)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._sequences)

    def stats(self) -> SchedulerStats:
        counts = self.get_request_counts()
        return SchedulerStats(
            num_running=counts.running,
            num_waiting=counts.waiting,
            wait_reason=self._planner.wait_reason,
            num_swapped=counts.swapped,
            num_used_blocks=self.kv.pool.num_used,
            num_blocks=self.kv.pool.num_blocks,
            num_used_host_blocks=self.swap_space.num_used,
            num_host_blocks=self.swap_space.num_blocks,
            num_steps=self._counters.num_steps,
            num_stalls=self._counters.num_stalls,
            preemptions=self._counters.preemptions(),
            num_swap_space_full=self._planner.preemptor.num_swap_space_full,
            num_prefix_queries=self._counters.num_prefix_queries,
            num_prefix_hits=self._counters.num_prefix_hits,
            num_recomputed_tokens=self._counters.num_recomputed_tokens,
        )

    def _close(self, plan: PlanDraft) -> SchedulerOutput:
        self._released += plan.released
        if plan.is_empty:
            self._watch()
            return plan.finished(self._counters.num_steps, ())
        self._watchdog.sees_a_stall(has_work=False)
        self._counters.num_steps += 1
        released, self._released = tuple(self._released), []
        return plan.finished(self._counters.num_steps, released)

    def _watch(self) -> None:
        """Work, nothing under way and nothing planned must not be, and must never become a hang."""
        is_under_way = any(seq.num_uncomputed_tokens == 0 for seq in self._lines.running)
        if not self._watchdog.sees_a_stall(has_work=bool(self._sequences) and not is_under_way):
            return
        self._counters.num_stalls += 1
        first = self._lines.running[0] if self._lines.running else self._lines.waiting.peek()
        self._finish(first, FinishReason.FAILED, message="the scheduler cannot serve this request")

    # Learning what came of it.

    def _take_tokens(self, seq: Sequence, token_ids: tuple[int, ...], result: ModelRunnerOutput) -> None:
        reason: FinishReason | None = None
        for token_id in token_ids:
            seq.append_token(token_id)
            reason = self._stop_reason(seq, token_id)
        self._lines.charge(seq.tenant, GENERATED_TOKEN_COST * len(token_ids))
        start, seq.pending_start = seq.pending_start, None
        logprobs = result.logprobs.get(seq.sequence_id, ()) if result.logprobs else ()
        output = SequenceOutput(seq.sequence_id, token_ids, reason, logprobs, start)
        if reason is None:
            self._outputs.setdefault(seq.client_index, []).append(output)
        else:
            self._end(seq, reason, output)

    def _stop_reason(self, seq: Sequence, token_id: int) -> FinishReason | None:
        params = seq.params
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if seq.num_output_tokens >= params.max_tokens or seq.num_tokens >= self.config.max_model_len:
            return FinishReason.LENGTH
        return None

    # Ending.

    def _finish(self, seq: Sequence, reason: FinishReason, message: str = "") -> None:
        output = SequenceOutput(seq.sequence_id, (), reason, start=seq.pending_start, message=message)
        self._end(seq, reason, output)

    def _end(self, seq: Sequence, reason: FinishReason, output: SequenceOutput) -> None:
        """The one way out, from any queue."""
        before = seq.status
        self._lines.finish(seq)
        seq.finish_reason = reason
        if before is Status.RUNNING:
            self.kv.free(seq)
            self._released.append(seq.sequence_id)
        elif before is Status.SWAPPED:
            self._planner.preemptor.drop(seq)
        del self._sequences[seq.sequence_id]
        self._outputs.setdefault(seq.client_index, []).append(output)

    def _refuse_what_never_fits(self, seq: Sequence) -> None:
        if seq.num_tokens >= self.config.max_model_len:
            raise NeverFits(
                f"the prompt has {seq.num_tokens} tokens; with at least one to generate, at most "
                f"{self.config.max_model_len - 1} fit the context window"
            )
        if not self.kv.can_ever_fit(seq.num_tokens):
            raise NeverFits(
                f"the prompt has {seq.num_tokens} tokens; the KV cache holds "
                f"{self.kv.pool.num_blocks * self.config.block_size}"
            )
