"""One step: who gets a share of it, who is admitted, who has to go.

Owns: the order of these decisions. Each touches a sequence at most once, so that nothing planned is undone.
Never: what came of a step, or how a sequence ends (scheduler.py).

The running line is kept in rank order. It is served from the front; whoever lacks a block takes those of
the back. So the worst pays first:

    served -->                               <-- preempted
    [ best, ..., here, ........, worse, worst ]

A waiting sequence that is strictly more urgent than a running one does not queue behind it: before the
line is served it may send some of its back away (displacement.py), if that is enough. Who is sent away
keeps its rank, and returns from the waiting line by recompute, or from the swap space (preemption.py).
"""

from collections.abc import Callable

from scheduler.budget import budget_for_step
from scheduler.config import Batching, Displacement, PreemptionMode, SchedulerConfig, SchedulingPolicy
from scheduler.counters import Counters
from scheduler.displacement import PROTECTED_TOKENS, choose_victims, stands_before_some
from scheduler.fairness import PROMPT_TOKEN_COST
from scheduler.kv_cache_manager import Fit, KVCacheManager
from scheduler.lines import Lines
from scheduler.messages import (
    FinishReason,
    Preemption,
    PreemptionCause,
    ScheduledSequence,
    SequenceStart,
    WaitReason,
)
from scheduler.plan_draft import PlanDraft
from scheduler.preemption import Preemptor
from scheduler.sequence import Sequence, Status
from scheduler.step_time import StepTimeModel

# How far behind a head that does not fit it is looked for one that does.
_BYPASS_WINDOW = 8


class Planner:
    """Plans one step after the other over the lines of a scheduler.

    `finish` ends a sequence for which there can never be room.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        lines: Lines,
        *,
        counters: Counters,
        finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self._config = config
        self._kv = kv
        self._lines = lines
        self._counters = counters
        self._finish = finish
        self.step_time = StepTimeModel()
        self.preemptor = Preemptor(config, kv, self.step_time)
        self._nobody_fitted: tuple[int, ...] | None = None
        self.wait_reason = WaitReason.STEP
        """What the waiting line waited for in the last step."""
        self._may_displace = (
            config.policy is SchedulingPolicy.PRIORITY and config.displacement is Displacement.ON
        )

    def plan(self, *, now_s: float) -> PlanDraft:
        """Everything that happens in the next step."""
        self.preemptor.swap_space.next_plan()
        plan = PlanDraft(budget_for_step(self._config, self._lines.running, self.step_time), now_s)
        if self._may_displace:
            self._admit_urgent(plan)
        if self._config.batching is Batching.SEPARATE:
            self._plan_separately(plan)
        else:
            self._serve_running(plan)
            self._admit_waiting(plan)
        return plan

    def _plan_separately(self, plan: PlanDraft) -> None:
        """Prefill alone if there is any to do and it is due, else decodes alone."""
        num_decodes, plan.budget.num_decodes_ahead = plan.budget.num_decodes_ahead, 0
        self._serve_prefills(plan)
        if self._prefill_is_due(plan.now_s):
            self._admit_waiting(plan)
        if not plan.chunks:
            plan.budget.num_decodes_ahead = num_decodes
            self._serve_running(plan)

    # The running line, from the front.

    def _serve_running(self, plan: PlanDraft) -> None:
        place = 0
        while place < len(self._lines.running) and plan.budget.remaining_tokens > 0:
            seq = self._lines.running[place]
            place += 1
            if plan.urgent and seq.sequence_id in plan.urgent:
                continue
            if seq.num_tokens > seq.num_slots and not self._grow(seq, plan):
                break
            self._schedule_share(seq, plan)

    def _serve_prefills(self, plan: PlanDraft) -> None:
        """Only those who have more than one token to compute; they have all their blocks already."""
        for seq in self._lines.running:
            is_prefill = seq.num_uncomputed_tokens > 1
            if is_prefill and plan.budget.remaining_tokens > 0 and seq.sequence_id not in plan.urgent:
                self._schedule_share(seq, plan)

    def _prefill_is_due(self, now_s: float) -> bool:
        """Whether newcomers may interrupt decoding: they have waited for long enough to be worth it."""
        if not self._config.prefill_delay_factor or not self._lines.running or not len(self._lines.waiting):
            return True
        waited_s = now_s - self._lines.waiting.peek().admitted_s
        return waited_s > self._config.prefill_delay_factor * self.step_time.last_prefill_s

    def _schedule_share(self, seq: Sequence, plan: PlanDraft) -> None:
        start = seq.num_computed_tokens
        num_left = seq.num_tokens - start
        if num_left == 1:
            plan.budget.take_decode()
            seq.num_computed_tokens = start + 1
            if seq.num_computed_tokens % self._config.block_size == 0:
                self._kv.publish(seq, start, start + 1)
            plan.decodes.append(ScheduledSequence(seq.sequence_id, start, 1, samples=True))
            return
        share = plan.budget.take_chunk(self._chunk_wanted(seq))
        if share:
            self._schedule_chunk(seq, share, plan)

    def _chunk_wanted(self, seq: Sequence) -> int:
        """All that is left; less if others would like a part of the step too."""
        limit = self._config.max_chunk_tokens
        if limit and len(self._lines.running) + len(self._lines.waiting) > 1:
            return min(seq.num_uncomputed_tokens, limit)
        return seq.num_uncomputed_tokens

    def _schedule_chunk(self, seq: Sequence, share: int, plan: PlanDraft) -> None:
        start = seq.num_computed_tokens
        seq.num_computed_tokens = start + share
        self._kv.publish(seq, start, start + share)
        plan.chunks.append(ScheduledSequence(seq.sequence_id, start, share, seq.num_uncomputed_tokens == 0))

    def _grow(self, seq: Sequence, plan: PlanDraft) -> bool:
        """Blocks for `seq`, at the expense of the back of the line if need be; False if it had to go."""
        while (fresh := self._kv.append(seq)) is None:
            if len(self._lines.running) == 1:
                # Everybody else is gone and it still does not fit: more memory will never come.
                plan.budget.give_up_decode()
                plan.budget.give_back_slot()
                self._finish(seq, FinishReason.LENGTH)
                return False
            behind = self._lines.behind(seq)
            victim = self.preemptor.choose_victim(behind) if behind else seq
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
        num_computed, num_free = victim.num_computed_tokens, self._kv.pool.num_free
        is_swap = self.preemptor.mode_for(victim) is PreemptionMode.SWAP
        if is_swap:
            plan.swap_out.extend(self.preemptor.swap_out(victim))
        self._kv.free(victim)
        plan.released.append(victim.sequence_id)
        self._lines.send_back(victim, Status.SWAPPED if is_swap else Status.WAITING)
        victim.num_preemptions += 1
        preemption = Preemption(
            sequence_id=victim.sequence_id,
            cause=cause,
            was_swapped=is_swap,
            beneficiary=beneficiary.sequence_id,
            num_computed_tokens=num_computed,
            num_freed_blocks=self._kv.pool.num_free - num_free,
        )
        plan.preemptions.append(preemption)
        self._counters.note_preemption(preemption)

    # The waiting line.

    def _admit_urgent(self, plan: PlanDraft) -> None:
        """Whoever is strictly more urgent than some who run does not queue behind them."""
        budget, running, waiting = plan.budget, self._lines.running, self._lines.waiting
        while len(waiting) and stands_before_some(seq := waiting.peek(), running):
            if any(preemption.sequence_id == seq.sequence_id for preemption in plan.preemptions):
                return  # whoever was sent away does not come back in the same step
            victims = choose_victims(
                seq,
                self._kv.need(seq),
                running,
                pool=self._kv.pool,
                num_free_slots=budget.remaining_seqs,
            )
            if victims is None or any(victim.sequence_id in plan.urgent for victim in victims):
                return  # whoever has a share of this step keeps it
            num_decodes = budget.num_decodes_ahead - sum(v.num_uncomputed_tokens == 1 for v in victims)
            if budget.remaining_tokens <= num_decodes:
                return
            for victim in victims:
                budget.give_back_slot()
                self._preempt(victim, plan, PreemptionCause.DISPLACED, seq)
            self._admit(seq, plan)
            plan.urgent.add(seq.sequence_id)

    def _admit_waiting(self, plan: PlanDraft) -> None:
        # Who was just sent away must not be passed by a newcomer, nor come back in the same step.
        self.wait_reason = WaitReason.PREEMPTION if plan.preemptions else self._admit_in_order(plan)

    def _admit_in_order(self, plan: PlanDraft) -> WaitReason:
        """In order of rank, until somebody has to wait for something."""
        budget = plan.budget
        if self._nobody_fitted is not None and self._nobody_fitted == self._memory_state():
            return WaitReason.BLOCKS  # looking again would find the same
        self._nobody_fitted = None
        while len(self._lines.waiting):
            if budget.remaining_seqs <= 0:
                return WaitReason.PLACES
            if budget.remaining_tokens <= 0:
                return WaitReason.TOKENS
            seq = self._lines.waiting.peek()
            fit = self._kv.can_allocate(seq, num_running=len(self._lines.running))
            if fit is Fit.NEVER:
                # It grew while it ran, was preempted, and now outgrows even the empty pool.
                self._finish(seq, FinishReason.LENGTH)
                continue
            if fit is Fit.LATER:
                passing = self._passing(seq)
                if passing is None:
                    self._nobody_fitted = self._memory_state()
                    return WaitReason.BLOCKS
                seq.num_bypasses += 1
                seq = passing
            self._admit(seq, plan)
        return WaitReason.STEP

    def _memory_state(self) -> tuple[int, ...]:
        """Whatever decides whether anybody of the waiting line fits."""
        head = self._lines.waiting.peek().admission if len(self._lines.waiting) else 0
        return (
            self._kv.pool.num_free,
            self._kv.prefix_cache.num_changes,
            len(self._lines.running),
            len(self._lines.waiting),
            self._counters.num_added,  # one may have left and another come
            head,
        )

    def _passing(self, head: Sequence) -> Sequence | None:
        """One behind a head that does not fit yet, which does; None once enough have passed it."""
        if head.num_bypasses >= self._config.max_bypasses:
            return None
        for seq in self._lines.waiting.after_first(_BYPASS_WINDOW):
            if self._kv.can_allocate(seq, num_running=len(self._lines.running)) is Fit.OK:
                return seq
        return None

    def _admit(self, seq: Sequence, plan: PlanDraft) -> None:
        self._kv.allocate(seq)
        if seq.status is Status.SWAPPED:
            plan.swap_in.extend(self.preemptor.swap_in(seq))
        self._lines.admit(seq)
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
        # Once: a preemption is not the tenant's doing.
        num_to_compute = seq.num_prompt_tokens - seq.num_cached_tokens
        self._lines.charge(seq.tenant, PROMPT_TOKEN_COST * num_to_compute)
        seq.pending_start = SequenceStart(
            queue_s=now_s - seq.admitted_s, num_cached_tokens=seq.num_cached_tokens
        )
