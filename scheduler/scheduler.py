"""Who computes how many tokens in the next step.

Owns: every sequence that is not finished, the waiting queue and the running line.
Never: tensors, clocks, tasks. `schedule` decides, `update_from_output` learns what came of it.
Sources: continuous batching (Orca), chunked prefill (Sarathi-Serve, arXiv:2403.02310), paged KV
(arXiv:2309.06180).

The running line is kept in rank order. It is served from the front; whoever lacks a block takes those of
the back. So the worst pays first, and nothing that was already planned in this step is undone:

    served -->                               <-- preempted
    [ best, ..., here, ........, worse, worst ]

A waiting sequence that is strictly more urgent than a running one does not queue behind it: before the
line is served it may send some of its back away (displacement.py), if that is enough.

Who is sent away keeps its rank, and returns from the waiting line by recompute, or from the swap space
(preemption.py).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

from scheduler.budget import budget_for_step
from scheduler.config import Displacement, Fairness, PreemptionMode, SchedulerConfig, SchedulingPolicy
from scheduler.counters import Counters
from scheduler.deadlines import Deadlines
from scheduler.displacement import PROTECTED_TOKENS, choose_victims, stands_before_some
from scheduler.fairness import (
    GENERATED_TOKEN_COST,
    PROMPT_TOKEN_COST,
    FairWaitingQueue,
    TenantLedger,
)
from scheduler.kv_cache_manager import Fit, KVCacheManager
from scheduler.messages import (
    FinishReason,
    ModelRunnerOutput,
    Preemption,
    PreemptionCause,
    RequestCounts,
    ScheduledSequence,
    SchedulerOutput,
    SchedulerStats,
    SequenceId,
    SequenceOutput,
    SequenceReport,
    SequenceStart,
    WaitReason,
)
from scheduler.plan_draft import PlanDraft
from scheduler.policy import rank_of
from scheduler.preemption import Preemptor
from scheduler.reports import report_on
from scheduler.sequence import Sequence, Status
from scheduler.step_time import StepTimeModel
from scheduler.swap_space import SwapSpace
from scheduler.waiting_queue import WaitingQueue
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
        self._step_time = StepTimeModel()
        self._preemptor = Preemptor(config, self.kv, self._step_time)
        self._rank = rank_of(config)
        self._sequences: dict[SequenceId, Sequence] = {}
        self._ledger: TenantLedger | None = None
        self._waiting: WaitingQueue | FairWaitingQueue = WaitingQueue()
        if config.fairness is Fairness.TENANT:
            self._ledger = TenantLedger(dict(config.tenant_weights))
            self._waiting = FairWaitingQueue(config, self._ledger)
        self._running: list[Sequence] = []
        self._released: list[SequenceId] = []  # rows that the worker may free, told with the next plan
        self._outputs: Outputs = {}
        self._deadlines = Deadlines()
        self._may_displace = (
            config.policy is SchedulingPolicy.PRIORITY and config.displacement is Displacement.ON
        )
        self._num_swapped = 0
        self._watchdog = Watchdog()
        self._wait_reason = WaitReason.STEP
        self._counters = Counters()

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
        if self._ledger is not None:
            self._ledger.join(seq.tenant)
        self._waiting.push(seq)
        self._deadlines.add(seq)

    def schedule(self, *, now_s: float) -> SchedulerOutput:
        """Plan the next step. The plan counts as computed from now on; results only add tokens."""
        self._preemptor.swap_space.next_plan()
        for seq, limit in self._deadlines.expired(now_s=now_s):
            self._finish(seq, FinishReason.EXPIRED, message=limit.value)
        plan = PlanDraft(budget_for_step(self.config, self._running, self._step_time), now_s)
        if self._may_displace:
            self._admit_urgent(plan)
        self._serve_running(plan)
        if plan.preemptions:  # who was just sent away must not be passed by a newcomer, nor come back
            self._wait_reason = WaitReason.PREEMPTION
        else:
            self._wait_reason = self._admit_waiting(plan)
        return self._close(plan)

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
                self._preemptor.drop(seq)
                seq.become(Status.WAITING)
                self._num_swapped -= 1
        return self.take_outputs()

    def finish_requests(self, sequence_ids: Iterable[SequenceId], reason: FinishReason) -> None:
        """End these now, wherever they are; ids that are unknown or ended already are passed over."""
        for sequence_id in sequence_ids:
            seq = self._sequences.get(sequence_id)
            if seq is not None:
                self._finish(seq, reason)

    def take_outputs(self) -> Outputs:
        """What was not delivered yet, for steps that had nothing to compute."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def get_request_counts(self) -> RequestCounts:
        return RequestCounts(
            running=len(self._running),
            waiting=len(self._waiting) - self._num_swapped,
            swapped=self._num_swapped,
        )

    def observe_step(self, plan: SchedulerOutput, seconds: float) -> None:
        """How long the worker took for a plan; what follows is decided by such figures."""
        self._step_time.observe(plan.num_scheduled_tokens, seconds)

    def report(self, *, now_s: float) -> list[SequenceReport]:
        """Every live sequence, and why it waits."""
        return report_on(self._running, list(self._waiting), self._wait_reason, now_s=now_s)

    def tenant_service(self) -> dict[str, float]:
        """What each tenant had so far, by cost; empty without fairness."""
        return {} if self._ledger is None else self._ledger.tenants

    @property
    def swap_space(self) -> SwapSpace:
        return self._preemptor.swap_space

    def running_sequences(self) -> list[Sequence]:
        """In the order in which they are served; the sequences themselves are not copies."""
        return list(self._running)

    def waiting_sequences(self) -> list[Sequence]:
        """Swapped ones too; in no particular order."""
        return list(self._waiting)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._sequences)

    def stats(self) -> SchedulerStats:
        counts = self.get_request_counts()
        return SchedulerStats(
            num_running=counts.running,
            num_waiting=counts.waiting,
            wait_reason=self._wait_reason,
            num_swapped=counts.swapped,
            num_used_blocks=self.kv.pool.num_used,
            num_blocks=self.kv.pool.num_blocks,
            num_used_host_blocks=self.swap_space.num_used,
            num_host_blocks=self.swap_space.num_blocks,
            num_steps=self._counters.num_steps,
            num_stalls=self._counters.num_stalls,
            preemptions=self._counters.preemptions(),
            num_swap_space_full=self._preemptor.num_swap_space_full,
            num_prefix_queries=self._counters.num_prefix_queries,
            num_prefix_hits=self._counters.num_prefix_hits,
            num_recomputed_tokens=self._counters.num_recomputed_tokens,
        )

    # Planning: the running line, from the front.

    def _serve_running(self, plan: PlanDraft) -> None:
        place = 0
        while place < len(self._running) and plan.budget.remaining_tokens > 0:
            seq = self._running[place]
            place += 1
            if plan.urgent and seq.sequence_id in plan.urgent:
                continue
            if seq.num_tokens > seq.num_slots and not self._grow(seq, plan):
                break
            self._schedule_share(seq, plan)

    def _schedule_share(self, seq: Sequence, plan: PlanDraft) -> None:
        start = seq.num_computed_tokens
        num_left = seq.num_tokens - start
        if num_left == 1:
            plan.budget.take_decode()
            seq.num_computed_tokens = start + 1
            if seq.num_computed_tokens % self.config.block_size == 0:
                self.kv.publish(seq, start, start + 1)
            plan.decodes.append(ScheduledSequence(seq.sequence_id, start, 1, samples=True))
            return
        share = plan.budget.take_chunk(self._chunk_wanted(seq))
        if share:
            self._schedule_chunk(seq, share, plan)

    def _chunk_wanted(self, seq: Sequence) -> int:
        """All that is left; less if others would like a part of the step too."""
        limit = self.config.max_chunk_tokens
        if limit and len(self._running) + len(self._waiting) > 1:
            return min(seq.num_uncomputed_tokens, limit)
        return seq.num_uncomputed_tokens

    def _schedule_chunk(self, seq: Sequence, share: int, plan: PlanDraft) -> None:
        start = seq.num_computed_tokens
        seq.num_computed_tokens = start + share
        self.kv.publish(seq, start, start + share)
        plan.chunks.append(ScheduledSequence(seq.sequence_id, start, share, seq.num_uncomputed_tokens == 0))

    def _grow(self, seq: Sequence, plan: PlanDraft) -> bool:
        """Blocks for `seq`, at the expense of the back of the line if need be; False if it had to go."""
        while (fresh := self.kv.append(seq)) is None:
            if len(self._running) == 1:
                # Everybody else is gone and it still does not fit: more memory will never come.
                plan.budget.give_up_decode()
                plan.budget.give_back_slot()
                self._finish(seq, FinishReason.LENGTH)
                return False
            behind = self._running[bisect_left(self._running, seq.rank, key=_rank_of) + 1 :]
            victim = self._preemptor.choose_victim(behind) if behind else seq
            assert victim.sequence_id not in plan.urgent, "the urgent left room for everybody's growth"
            self._preempt(victim, plan, PreemptionCause.GROWTH, seq)
            if victim is seq:
                return False
        plan.new_blocks[seq.sequence_id] = fresh
        return True

    def _preempt(
        self, victim: Sequence, plan: PlanDraft, cause: PreemptionCause, beneficiary: Sequence
    ) -> None:
        """Take its blocks; it returns to its old place among the waiting."""
        if victim.num_uncomputed_tokens == 1:
            plan.budget.give_up_decode()
        num_computed, num_free = victim.num_computed_tokens, self.kv.pool.num_free
        is_swap = self._preemptor.mode_for(victim) is PreemptionMode.SWAP
        if is_swap:
            plan.swap_out.extend(self._preemptor.swap_out(victim))
            self._num_swapped += 1
        self._leave_line(victim)
        victim.become(Status.SWAPPED if is_swap else Status.WAITING)
        victim.num_preemptions += 1
        self._waiting.push(victim)
        preemption = Preemption(
            sequence_id=victim.sequence_id,
            cause=cause,
            was_swapped=is_swap,
            beneficiary=beneficiary.sequence_id,
            num_computed_tokens=num_computed,
            num_freed_blocks=self.kv.pool.num_free - num_free,
        )
        plan.preemptions.append(preemption)
        self._counters.note_preemption(preemption)

    # Planning: the waiting queue.

    def _admit_urgent(self, plan: PlanDraft) -> None:
        """Whoever is strictly more urgent than some who run does not queue behind them."""
        budget = plan.budget
        while len(self._waiting) and stands_before_some(seq := self._waiting.peek(), self._running):
            victims = choose_victims(
                seq,
                self.kv.need(seq),
                self._running,
                pool=self.kv.pool,
                num_free_slots=budget.remaining_seqs,
            )
            if victims is None:
                return
            num_decodes = budget.num_decodes_ahead - sum(v.num_uncomputed_tokens == 1 for v in victims)
            if budget.remaining_tokens <= num_decodes:
                return
            for victim in victims:
                budget.give_back_slot()
                self._preempt(victim, plan, PreemptionCause.DISPLACED, seq)
            self._admit(seq, plan)
            plan.urgent.add(seq.sequence_id)

    def _admit_waiting(self, plan: PlanDraft) -> WaitReason:
        """In order of rank, until somebody has to wait for something."""
        budget = plan.budget
        while len(self._waiting):
            if budget.remaining_seqs <= 0:
                return WaitReason.PLACES
            if budget.remaining_tokens <= 0:
                return WaitReason.TOKENS
            seq = self._waiting.peek()
            fit = self.kv.can_allocate(seq, num_running=len(self._running))
            if fit is Fit.NEVER:
                # It grew while it ran, was preempted, and now outgrows even the empty pool.
                self._finish(seq, FinishReason.LENGTH)
                continue
            if fit is Fit.LATER:
                passing = self._passing(seq)
                if passing is None:
                    return WaitReason.BLOCKS
                seq.num_bypasses += 1
                seq = passing
            self._admit(seq, plan)
        return WaitReason.STEP

    def _passing(self, head: Sequence) -> Sequence | None:
        """One behind a head that does not fit yet, which does; None once enough have passed it."""
        if head.num_bypasses >= self.config.max_bypasses:
            return None
        for seq in self._waiting.after_first(_BYPASS_WINDOW):
            if self.kv.can_allocate(seq, num_running=len(self._running)) is Fit.OK:
                return seq
        return None

    def _admit(self, seq: Sequence, plan: PlanDraft) -> None:
        self._waiting.take(seq)
        self.kv.allocate(seq)
        if seq.status is Status.SWAPPED:
            plan.swap_in.extend(self._preemptor.swap_in(seq))
            self._num_swapped -= 1
        seq.become(Status.RUNNING)
        insort(self._running, seq, key=_rank_of)
        plan.budget.take_slot()
        if seq.num_preemptions:
            seq.protected_until = seq.num_tokens + PROTECTED_TOKENS
        else:
            self._note_start(seq, plan.now_s)
        plan.new_sequences.append(seq.as_new())
        self._schedule_chunk(seq, plan.budget.take_chunk(self._chunk_wanted(seq)), plan)

    def _note_start(self, seq: Sequence, now_s: float) -> None:
        seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        self._counters.num_prefix_queries += seq.num_prompt_tokens
        self._counters.num_prefix_hits += seq.num_cached_tokens
        if self._ledger is not None:  # once: a preemption is not the tenant's doing
            self._ledger.charge(
                seq.tenant, PROMPT_TOKEN_COST * (seq.num_prompt_tokens - seq.num_cached_tokens)
            )
        seq.pending_start = SequenceStart(
            queue_s=now_s - seq.admitted_s, num_cached_tokens=seq.num_cached_tokens
        )

    def _close(self, plan: PlanDraft) -> SchedulerOutput:
        if plan.is_empty:
            self._watch()
            return plan.finished(self._counters.num_steps, ())
        self._watchdog.sees_a_stall(has_work=False)
        self._counters.num_steps += 1
        released, self._released = tuple(self._released), []
        return plan.finished(self._counters.num_steps, released)

    def _watch(self) -> None:
        """Work, nothing under way and nothing planned must not be, and must never become a hang."""
        is_under_way = any(seq.num_uncomputed_tokens == 0 for seq in self._running)
        if not self._watchdog.sees_a_stall(has_work=bool(self._sequences) and not is_under_way):
            return
        self._counters.num_stalls += 1
        first = self._running[0] if self._running else self._waiting.peek()
        self._finish(first, FinishReason.FAILED, message="the scheduler cannot serve this request")

    # Learning what came of it.

    def _take_tokens(self, seq: Sequence, token_ids: tuple[int, ...], result: ModelRunnerOutput) -> None:
        reason: FinishReason | None = None
        for token_id in token_ids:
            seq.append_token(token_id)
            reason = self._stop_reason(seq, token_id)
        if self._ledger is not None:
            self._ledger.charge(seq.tenant, GENERATED_TOKEN_COST * len(token_ids))
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
        seq.become(Status.FINISHED)
        seq.finish_reason = reason
        if before is Status.RUNNING:
            self._leave_line(seq)
        else:
            self._waiting.discard(seq)
        if before is Status.SWAPPED:
            self._preemptor.drop(seq)
            self._num_swapped -= 1
        if self._ledger is not None:
            self._ledger.leave(seq.tenant)
        del self._sequences[seq.sequence_id]
        self._outputs.setdefault(seq.client_index, []).append(output)

    def _leave_line(self, seq: Sequence) -> None:
        place = bisect_left(self._running, seq.rank, key=_rank_of)
        assert self._running[place] is seq
        del self._running[place]
        self.kv.free(seq)
        self._released.append(seq.sequence_id)

    def _refuse_what_never_fits(self, seq: Sequence) -> None:
        if seq.num_tokens >= self.config.max_model_len:
            raise NeverFits(
                f"the prompt has {seq.num_tokens} tokens; with at least one to generate, at most "
                f"{self.config.max_model_len - 1} fit the context window"
            )
        if self.kv.can_allocate(seq, num_running=0) is Fit.NEVER:
            raise NeverFits(
                f"the prompt has {seq.num_tokens} tokens; the KV cache holds "
                f"{self.kv.pool.num_blocks * self.config.block_size}"
            )
