"""Who of the waiting line is admitted to a step, and what the others wait for.

Owns: the order of admission, bounded bypass, and what is noted when a sequence starts.
Never: serves the running line (planner.py), chooses victims (displacement.py), or sends anybody away itself
(preemption.py).
"""

from collections.abc import Callable
from itertools import takewhile

from scheduler.blocks.kv_cache_manager import Fit, Need
from scheduler.config import PrefixCaching
from scheduler.lines.fairness import PROMPT_TOKEN_COST
from scheduler.messages import FinishReason, PreemptionCause, SequenceStart, WaitReason
from scheduler.sequence import Sequence
from scheduler.step.budget import SchedulingBudget
from scheduler.step.displacement import PROTECTED_TOKENS, choose_victims, stands_before_some
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.preemption import Preemptor
from scheduler.step.scheduler_state import SchedulerState
from scheduler.step.token_shares import Shares

# How far behind a head that does not fit it is looked for one that does.
_BYPASS_WINDOW = 8


class Admission:
    """`finish` ends a sequence for which there can never be room."""

    def __init__(
        self,
        state: SchedulerState,
        shares: Shares,
        preemptor: Preemptor,
        *,
        finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self._state = state
        self._config = state.config
        self._kv = state.kv
        self._lines = state.lines
        self._shares = shares
        self._preemptor = preemptor
        self._finish = finish
        self._nobody_fitted: tuple[int, ...] | None = None
        self.wait_reason = WaitReason.STEP
        """What the waiting line waited for in the last step."""

    def admit_urgent(self, plan: PlanDraft) -> None:
        """Whoever is strictly more urgent than some who run does not queue behind them."""
        budget, running, waiting = plan.budget, self._lines.running, self._lines.waiting
        while len(waiting) and stands_before_some(seq := waiting.peek(), running):
            if any(preemption.sequence_id == seq.sequence_id for preemption in plan.preemptions):
                return  # whoever was sent away does not come back in the same step
            if self._obstacle(seq, budget) is not None:
                return  # places and blocks are all that displacing gives
            need = self._kv.need(seq)
            if self._lacks_encoder(seq, need):
                return
            victims = choose_victims(seq, need, running, kv=self._kv, num_free_slots=budget.remaining_seqs)
            if victims is None or any(victim.sequence_id in plan.urgent for victim in victims):
                return  # whoever has a share of this step keeps it
            num_decodes = budget.num_decodes_ahead - sum(v.num_uncomputed_tokens == 1 for v in victims)
            room = budget.chunk_tokens(seq, num_decodes=num_decodes)
            if room < _least_share(seq) or self._would_delay_better(seq, need, room, plan):
                return
            self._kv.pin(need)
            for victim in victims:
                budget.give_back_slot()
                self._preemptor.send_away(victim, plan, PreemptionCause.DISPLACED, seq)
            self._admit(seq, need, plan)
            plan.urgent.add(seq.sequence_id)

    def _would_delay_better(self, seq: Sequence, need: Need, room: int, plan: PlanDraft) -> bool:
        """Whether prompts that stand before it in the line would get less of the step for its chunk.

        Else urgent ones that keep coming would stop an earlier one of their own priority.
        """
        before = takewhile(lambda each: each.rank < seq.rank, self._lines.running)
        unserved = [each for each in before if each.sequence_id not in plan.urgent]
        num_ahead = sum(self._shares.num_wanted(each) for each in unserved if each.num_uncomputed_tokens > 1)
        if not num_ahead:
            return False
        return room - num_ahead < min(self._shares.num_wanted(seq), seq.num_tokens - need.found.num_tokens)

    def pass_over(self) -> None:
        """Nobody is admitted to this step; who waits is looked at in the next one."""
        self.wait_reason = WaitReason.STEP

    def admit_waiting(self, plan: PlanDraft) -> None:
        if not len(self._lines.waiting):
            self.wait_reason = WaitReason.STEP
        elif plan.preemptions:
            # Who was just sent away must not be passed by a newcomer, nor come back in the same step.
            self.wait_reason = WaitReason.PREEMPTION
        else:
            self.wait_reason = self._admit_in_order(plan)

    def _admit_in_order(self, plan: PlanDraft) -> WaitReason:
        """In order of rank, until somebody has to wait for something."""
        budget = plan.budget
        if self._nobody_fitted is not None and self._nobody_fitted == self._memory_state():
            return WaitReason.BLOCKS  # looking again would find the same
        self._nobody_fitted = None
        while len(self._lines.waiting):
            if budget.remaining_seqs <= 0:
                return WaitReason.PLACES
            seq = self._lines.waiting.peek()
            reason = self._obstacle(seq, budget)
            if reason in (WaitReason.TOKENS, WaitReason.PREEMPTION):
                return reason
            need = self._kv.need(seq)
            if self._kv.can_allocate(need, num_running=len(self._lines.running)) is Fit.NEVER:
                # It grew while it ran, was preempted, and now outgrows even the empty pool.
                self._finish(seq, FinishReason.LENGTH)
                continue
            reason = reason or self._shortage(seq, need)
            if reason is not None:
                passing = self._passing(seq, budget)
                if passing is None:
                    self._remember_why(reason)
                    return reason
                seq.num_bypasses += 1
                seq, need = passing
            self._admit(seq, need, plan)
        return WaitReason.STEP

    def _obstacle(self, seq: Sequence, budget: SchedulingBudget) -> WaitReason | None:
        """What keeps one that waits out of this step, whatever is free."""
        if seq.num_preemptions and self._state.in_flight.draws_for(seq.sequence_id):
            return WaitReason.PREEMPTION  # the worker must be given all of its tokens
        if budget.chunk_tokens(seq, num_decodes=0) < _least_share(seq):
            return WaitReason.TOKENS
        if seq.adapter and not self._has_place_for_adapter(seq.adapter):
            return WaitReason.ADAPTER
        if seq.has_grammar and not budget.has_room_for_grammar(seq.compile_s):
            return WaitReason.GRAMMAR
        return None

    def _shortage(self, seq: Sequence, need: Need) -> WaitReason | None:
        """Of what it would take there is too little."""
        if self._kv.can_allocate(need, num_running=len(self._lines.running)) is not Fit.OK:
            return WaitReason.BLOCKS
        return WaitReason.ENCODER if self._lacks_encoder(seq, need) else None

    def _lacks_encoder(self, seq: Sequence, need: Need) -> bool:
        """Its first share would not come past an input that cannot be encoded in this step."""
        if not seq.encoder_inputs:
            return False
        start = need.found.num_tokens
        return self._shares.encoder_cache.reach(seq, start, seq.num_tokens - start) < _least_share(seq)

    def _has_place_for_adapter(self, adapter: str) -> bool:
        in_use = {seq.adapter for seq in self._lines.running if seq.adapter}
        return adapter in in_use or len(in_use) < self._config.max_adapters

    def _memory_state(self) -> tuple[int, ...]:
        """Whatever decides whether anybody of the waiting line fits."""
        head = self._lines.waiting.peek().admission if len(self._lines.waiting) else 0
        return (
            self._kv.pool.num_free,
            self._kv.num_changes,
            len(self._lines.running),
            len(self._lines.waiting),
            self._state.counters.num_added,  # one may have left and another come
            head,
        )

    def _passing(self, head: Sequence, budget: SchedulingBudget) -> tuple[Sequence, Need] | None:
        """One behind a head that does not fit yet, which does; None once enough have passed it."""
        if head.num_bypasses >= self._config.max_bypasses:
            return None
        for seq in self._lines.waiting.after_first(_BYPASS_WINDOW):
            if self._obstacle(seq, budget) is None:
                need = self._kv.need(seq)
                if self._shortage(seq, need) is None:
                    return seq, need
        return None

    def _remember_why(self, reason: WaitReason) -> None:
        """Nobody was admitted: the next step need not look again, if only memory decides."""
        behind = self._lines.waiting.after_first(_BYPASS_WINDOW)
        if reason is WaitReason.BLOCKS and not any(self._needs_more_than_blocks(seq) for seq in behind):
            self._nobody_fitted = self._memory_state()

    def _needs_more_than_blocks(self, seq: Sequence) -> bool:
        may_be_drawn_for = bool(seq.num_preemptions and self._state.in_flight)
        beside = seq.adapter or seq.encoder_inputs or seq.has_grammar
        return bool(beside or seq.is_indivisible or may_be_drawn_for)

    def _admit(self, seq: Sequence, need: Need, plan: PlanDraft) -> None:
        arrivals = self._kv.allocate(seq, need)
        plan.swap_in += arrivals.swap_in
        plan.copies += arrivals.copies
        self._lines.admit(seq)
        plan.budget.take_slot()
        if seq.has_grammar:
            plan.budget.take_grammar(seq.compile_s)
        if seq.num_preemptions:
            seq.protected_until = seq.num_tokens + PROTECTED_TOKENS
        else:
            self._note_start(seq, need, plan.now_s)
        plan.new_sequences.append(seq.as_new())
        self._shares.chunk(seq, plan.budget.take_chunk(seq, self._shares.num_wanted(seq)), plan)

    def _note_start(self, seq: Sequence, need: Need, now_s: float) -> None:
        seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        if seq.reads_prefix_cache and self._config.prefix_caching is PrefixCaching.ON:
            self._state.counters.num_prefix_queries += seq.num_prompt_tokens
        self._state.counters.num_prefix_hits += seq.num_cached_tokens
        self._state.counters.num_prefix_host_hits += len(need.found.host) * self._config.block_size
        # Once: a preemption is not the tenant's doing.
        num_to_compute = seq.num_prompt_tokens - seq.num_cached_tokens
        self._lines.charge(seq.tenant, PROMPT_TOKEN_COST * num_to_compute)
        seq.pending_start = SequenceStart(
            queue_s=now_s - seq.admitted_s, num_cached_tokens=seq.num_cached_tokens
        )


def _least_share(seq: Sequence) -> int:
    """How many tokens of a step are worth admitting it for."""
    return seq.num_tokens if seq.is_indivisible else 1
