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

from scheduler.budget import SchedulingBudget, budget_for_step
from scheduler.config import (
    Batching,
    Displacement,
    PreemptionMode,
    PrefixCaching,
    SchedulerConfig,
    SchedulingPolicy,
)
from scheduler.counters import Counters
from scheduler.displacement import PROTECTED_TOKENS, choose_victims, stands_before_some
from scheduler.drafts import Drafts
from scheduler.encoder_cache import EncoderCache
from scheduler.fairness import PROMPT_TOKEN_COST
from scheduler.in_flight import PlansInFlight
from scheduler.kv_cache_manager import Fit, KVCacheManager, Need
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
        in_flight: PlansInFlight,
        *,
        counters: Counters,
        finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self._config = config
        self._block_size = config.block_size
        self._kv = kv
        self._lines = lines
        self._in_flight = in_flight
        self._counters = counters
        self._finish = finish
        self.drafts = Drafts()
        self.encoder_cache = EncoderCache(config)
        self.step_time = StepTimeModel()
        self.preemptor = Preemptor(config, kv, self.step_time)
        self._has_window = kv.reach.is_limited
        self._nobody_fitted: tuple[int, ...] | None = None
        self.wait_reason = WaitReason.STEP
        """What the waiting line waited for in the last step."""
        self._may_displace = (
            config.policy is SchedulingPolicy.PRIORITY and config.displacement is Displacement.ON
        )

    def plan(self, *, now_s: float) -> PlanDraft:
        """Everything that happens in the next step."""
        if self._config.max_encoder_tokens:
            self.encoder_cache.next_plan()
        plan = PlanDraft(budget_for_step(self._config, self._lines.running, self.step_time), now_s)
        if self._may_displace:
            self._admit_urgent(plan)
        if self._config.batching is Batching.SEPARATE:
            self._plan_separately(plan)
        else:
            self._serve_running(plan)
            self._admit_waiting(plan)
        plan.swap_out += self._kv.complete_plan()
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
        running, budget = self._lines.running, plan.budget
        place = 0
        while place < len(running) and budget.remaining_tokens > 0:
            seq = running[place]
            place += 1
            if plan.urgent and seq.sequence_id in plan.urgent:
                continue
            if self._has_window:
                self._kv.pass_blocks(seq)
            if seq.num_tokens > seq.num_slots and not self._grow(seq, plan):
                break
            if seq.num_tokens - seq.num_computed_tokens == 1:
                self._schedule_decode(seq, plan)
            else:
                self._schedule_part(seq, plan)

    def _serve_prefills(self, plan: PlanDraft) -> None:
        """Only those who have more than one token to compute."""
        for seq in self._lines.running:
            is_prefill = seq.num_uncomputed_tokens > 1
            if is_prefill and plan.budget.remaining_tokens > 0 and seq.sequence_id not in plan.urgent:
                if self._has_window and not self._move_window(seq, plan):
                    continue
                self._schedule_part(seq, plan)

    def _move_window(self, seq: Sequence, plan: PlanDraft) -> bool:
        """Blocks for its next share, in exchange for those that the window passed.

        False if others still share these, and nothing else is free: it has to wait.
        """
        self._kv.pass_blocks(seq)
        fresh = self._kv.append(seq)
        if fresh:
            plan.new_blocks[seq.sequence_id] = fresh
        return fresh is not None

    def _prefill_is_due(self, now_s: float) -> bool:
        """Whether newcomers may interrupt decoding: they have waited for long enough to be worth it."""
        if not self._config.prefill_delay_factor or not self._lines.running or not len(self._lines.waiting):
            return True
        waited_s = now_s - self._lines.waiting.peek().admitted_s
        return waited_s > self._config.prefill_delay_factor * self.step_time.last_prefill_s

    def _schedule_decode(self, seq: Sequence, plan: PlanDraft) -> None:
        """One token; it may be the last one of a prompt, for which nothing is encoded."""
        start = seq.num_computed_tokens
        plan.budget.take_decode()
        seq.num_computed_tokens = end = start + 1
        # A block is found by its tokens: one that a plan in flight draws is published when it is known.
        if end % self._block_size == 0 and end <= len(seq.token_ids):
            self._publish(seq, start, end)
        if self.drafts.by_sequence and (drafts := self.drafts.take(seq)) is not None:
            self._schedule_drafts(seq, start, drafts, plan)
            return
        plan.decodes.append(ScheduledSequence(seq.sequence_id, start, 1, True))  # noqa: FBT003  (a hot path)
        if seq.num_tokens + 1 < seq.max_length:  # as expect_token, without the call
            seq.num_tokens += 1

    def _schedule_part(self, seq: Sequence, plan: PlanDraft) -> None:
        """As much of what it has left as there is budget for; nothing, if nothing is left."""
        share = plan.budget.take_chunk(self._chunk_wanted(seq))
        if share:
            self._schedule_chunk(seq, share, plan)

    def _schedule_drafts(self, seq: Sequence, start: int, drafts: tuple[int, ...], plan: PlanDraft) -> None:
        """A share with as many drafts as nobody else goes short for; how many will hold, nobody knows yet."""
        num_drafts = self._num_drafts_with_room(seq, len(drafts), plan)
        share = ScheduledSequence(seq.sequence_id, start, 1 + num_drafts, samples=True)
        if not num_drafts:
            plan.decodes.append(share)
            return
        fresh = self._kv.append(seq, num_lookahead=num_drafts)
        assert fresh is not None, "there was room for them"
        if fresh:
            plan.new_blocks[seq.sequence_id] = plan.new_blocks.get(seq.sequence_id, ()) + fresh
        plan.budget.remaining_tokens -= num_drafts
        plan.draft_token_ids[seq.sequence_id] = drafts[:num_drafts]
        plan.chunks.append(share)

    def _num_drafts_with_room(self, seq: Sequence, num_wanted: int, plan: PlanDraft) -> int:
        """In what the step and the sequence may still have, and in blocks that no growth will ask for."""
        budget = plan.budget
        num_drafts = min(
            num_wanted,
            budget.remaining_tokens - budget.num_decodes_ahead,
            seq.max_length - seq.num_tokens - 1,
        )
        if num_drafts <= seq.num_slots - seq.num_tokens:
            return max(num_drafts, 0)
        if plan.num_blocks_for_growth is None:
            growing = [each for each in self._lines.running if each.num_tokens > each.num_slots]
            plan.num_blocks_for_growth = len(growing)
        num_missing = self._kv.num_missing(seq, num_lookahead=num_drafts)
        if num_missing + plan.num_blocks_for_growth <= self._kv.pool.num_free:
            return num_drafts
        return seq.num_slots - seq.num_tokens

    def _chunk_wanted(self, seq: Sequence) -> int:
        """All that is left; less if others would like a part of the step too."""
        limit, wanted = self._config.max_chunk_tokens, seq.num_uncomputed_tokens
        if limit and not seq.is_indivisible and len(self._lines.running) + len(self._lines.waiting) > 1:
            wanted = min(wanted, limit)
        if seq.encoder_inputs:
            return self.encoder_cache.reach(seq, seq.num_computed_tokens, wanted)
        return wanted

    def _schedule_chunk(self, seq: Sequence, share: int, plan: PlanDraft) -> None:
        start = seq.num_computed_tokens
        seq.num_computed_tokens = end = start + share
        if seq.encoder_inputs:
            self._encode(seq, start, end, plan)
        self._publish(seq, start, end)
        samples = end == seq.num_tokens
        plan.chunks.append(ScheduledSequence(seq.sequence_id, start, share, samples))
        if samples:
            seq.expect_token()

    def _encode(self, seq: Sequence, start: int, end: int, plan: PlanDraft) -> None:
        inputs = self.encoder_cache.take(seq, start, end)
        if inputs:
            plan.encoder_inputs[seq.sequence_id] = inputs

    def _publish(self, seq: Sequence, start: int, end: int) -> None:
        if not seq.is_indivisible:
            self._kv.publish(seq, start, end)

    def _grow(self, seq: Sequence, plan: PlanDraft) -> bool:
        """Blocks for `seq`, at the expense of the back of the line if need be; False if it had to go."""
        while (fresh := self._kv.append(seq)) is None:
            if len(self._lines.running) == 1:
                if seq.num_uncomputed_tokens == 1:
                    plan.budget.give_up_decode()
                # Everybody else is gone and it still does not fit: more memory will never come. But what
                # is being drawn for it is told first.
                if not self._in_flight.draws_for(seq.sequence_id):
                    plan.budget.give_back_slot()
                    self._finish(seq, FinishReason.LENGTH)
                return False
            behind = self._lines.behind(seq)
            victim = self.preemptor.choose_victim(behind) if behind else seq
            assert victim.sequence_id not in plan.urgent, "the urgent left room for everybody's growth"
            self._preempt(victim, plan, PreemptionCause.GROWTH, seq)
            if victim is seq:
                return False
        if fresh:
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
            plan.swap_out += self._kv.copy_out(victim)
        self._kv.free(victim)
        self.forget_extras(victim)
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

    def forget_extras(self, seq: Sequence) -> None:
        """What it holds beside its blocks, now that it leaves the running line."""
        self.drafts.forget(seq)
        if seq.encoder_inputs:
            self.encoder_cache.release(seq)

    # The waiting line.

    def _admit_urgent(self, plan: PlanDraft) -> None:
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
            if budget.remaining_tokens - num_decodes < _least_share(seq):
                return
            self._kv.pin(need)
            for victim in victims:
                budget.give_back_slot()
                self._preempt(victim, plan, PreemptionCause.DISPLACED, seq)
            self._admit(seq, need, plan)
            plan.urgent.add(seq.sequence_id)

    def _admit_waiting(self, plan: PlanDraft) -> None:
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
        if seq.num_preemptions and self._in_flight.draws_for(seq.sequence_id):
            return WaitReason.PREEMPTION  # the worker must be given all of its tokens
        if budget.remaining_tokens < _least_share(seq):
            return WaitReason.TOKENS
        if seq.adapter and not self._has_place_for_adapter(seq.adapter):
            return WaitReason.ADAPTER
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
        return self.encoder_cache.reach(seq, start, seq.num_tokens - start) < _least_share(seq)

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
            self._counters.num_added,  # one may have left and another come
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
        may_be_drawn_for = bool(seq.num_preemptions and self._in_flight)
        return bool(seq.adapter or seq.encoder_inputs or seq.is_indivisible or may_be_drawn_for)

    def _admit(self, seq: Sequence, need: Need, plan: PlanDraft) -> None:
        arrivals = self._kv.allocate(seq, need)
        plan.swap_in += arrivals.swap_in
        plan.copies += arrivals.copies
        self._lines.admit(seq)
        plan.budget.take_slot()
        if seq.num_preemptions:
            seq.protected_until = seq.num_tokens + PROTECTED_TOKENS
        else:
            self._note_start(seq, need, plan.now_s)
        plan.new_sequences.append(seq.as_new())
        self._schedule_chunk(seq, plan.budget.take_chunk(self._chunk_wanted(seq)), plan)

    def _note_start(self, seq: Sequence, need: Need, now_s: float) -> None:
        seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        if seq.reads_prefix_cache and self._config.prefix_caching is PrefixCaching.ON:
            self._counters.num_prefix_queries += seq.num_prompt_tokens
        self._counters.num_prefix_hits += seq.num_cached_tokens
        self._counters.num_prefix_host_hits += len(need.found.host) * self._config.block_size
        # Once: a preemption is not the tenant's doing.
        num_to_compute = seq.num_prompt_tokens - seq.num_cached_tokens
        self._lines.charge(seq.tenant, PROMPT_TOKEN_COST * num_to_compute)
        seq.pending_start = SequenceStart(
            queue_s=now_s - seq.admitted_s, num_cached_tokens=seq.num_cached_tokens
        )


def _least_share(seq: Sequence) -> int:
    """How many tokens of a step are worth admitting it for."""
    return seq.num_tokens if seq.is_indivisible else 1
