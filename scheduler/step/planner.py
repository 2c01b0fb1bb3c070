"""Plan of one step: which sequences get a share of it, which are admitted, which are preempted.

Owns: the order of these decisions. Each touches a sequence at most once, so that nothing planned is undone.

The running queue is kept in order of rank. It is served from the front; a sequence that lacks a block takes
blocks of the back. So the worst pays first:

    served -->                               <-- preempted
    [ best, ..., here, ........, worse, worst ]

A waiting sequence that is strictly more urgent than a running one does not queue behind it: before the
running queue is served it may preempt some of its back, if that is enough (preemption.py). A preempted
sequence keeps its rank, and returns from the waiting queue by recompute, or from the swap space.
"""

from collections.abc import Callable
from operator import attrgetter

from scheduler.config import Batching, Displacement, Fairness
from scheduler.draft_messages import DraftChoice
from scheduler.messages import (
    FinishReason,
    GroupBlocks,
    PreemptionCause,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
    WaitReason,
)
from scheduler.sequence import Sequence, Status
from scheduler.step.admission import Admission
from scheduler.step.budget import BudgetLimits, SchedulingBudget, StepLimit
from scheduler.step.pace import budget_for_step, encoder_slice_s
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.preemption import Preemptor
from scheduler.step.scheduler_state import SchedulerState
from scheduler.step.token_shares import TokenShares

_rank_of = attrgetter("rank")


class Planner:
    """Plans one step after the other over the queues of a scheduler.

    `finish` ends a sequence for which there can never be room.
    """

    def __init__(
        self,
        state: SchedulerState,
        shares: TokenShares,
        *,
        finish: Callable[[Sequence, FinishReason, str], None],
    ) -> None:
        self._state = state
        self._config = state.config
        self._kv = state.kv
        self._queues = state.queues
        self._shares = shares
        self._drafts = state.drafts
        self._draft_shares = shares.draft_shares
        self._finish = finish
        self._step_time = state.step_time
        self._step_limit = StepLimit(state.config.max_num_batched_tokens)
        self._preemptor = Preemptor(state, shares.forget_extras)
        self._admission = Admission(state, shares, self._preemptor, finish=finish)
        self._passes_blocks = self._kv.passes_blocks
        self._has_chunks = False  # in the last plan
        self.draft_choice: DraftChoice | None = None
        """Drafts of the present step, where all that run decode."""
        self._num_stages = state.config.num_stages
        self._delays_prompts = False
        """True while the last step was for decodes alone, although prompts wait."""
        self._decides_always = self._num_stages > 1
        may_displace = self._config.displacement is Displacement.ON
        self._may_give_turns = self._config.fairness is Fairness.TENANT and may_displace
        self._may_displace = state.order.displaces and may_displace

    @property
    def wait_reason(self) -> WaitReason:
        """Reason why the waiting queue waited in the last step."""
        reason = WaitReason.DELAY if self._delays_prompts else self._admission.wait_reason
        if reason is WaitReason.STEP and self._queues.num_without_grammar:
            return WaitReason.GRAMMAR
        return reason

    def reason_of(self, seq: Sequence, place: int) -> WaitReason:
        """Reason why the sequence at this place of its queue waits; STEP for a running one that does not."""
        if seq.status is Status.RUNNING:
            return WaitReason.ENCODER if self._shares.awaits_encoder(seq) else WaitReason.STEP
        return WaitReason.DELAY if self._delays_prompts else self._admission.reason_of(seq, place)

    def plan_decodes(self) -> tuple[list[ScheduledSequence], dict[SequenceId, GroupBlocks]] | None:
        """Shares, and new blocks, of a step in which each running sequence gets one token.

        None if there is more to decide: then `plan` does. Most steps are like that, and with few sequences
        deciding nothing takes longer than all the rest.
        """
        self._admission.compile_ahead()  # in every step, whichever of the two plans it
        self.draft_choice = None
        running = self._queues.running
        if len(self._queues.waiting) or self._decides_always or self._shares.has_extras:
            return None
        if self._has_chunks and self._passes_blocks:
            return None  # windows have passed as much as a chunk, and not by a place at most as in a decode
        if not running or len(running) > self._step_limit.max_tokens:
            return None
        if not self._kv.is_plain or self._kv.pool.num_free < len(running):  # to undo the loop costs more
            num_growing = sum([seq.num_tokens > seq.num_slots for seq in running])
            if num_growing and not (self._kv.is_plain and num_growing <= self._kv.pool.num_free):
                return None
        # The last of the queue is the likeliest to have a prompt to compute: then the loop need not begin.
        decodes = self._shares.decode_all(running) if running[-1].num_uncomputed_tokens == 1 else None
        if decodes is None:
            return None
        shares, at_bounds = decodes
        self.draft_choice = self._drafts.choose(running, num_decodes=len(running))
        if self._drafts.offers:
            self._shares.take_back(running)
            return None
        self._admission.skip_step()
        growing = [seq for seq in at_bounds if seq.num_computed_tokens > seq.num_slots]
        grown = self._kv.append_blocks(growing) if growing else {}
        if at_bounds:
            self._shares.publish_full(at_bounds)
        return shares, grown

    def plan(self, *, now_s: float) -> PlanDraft:
        """Decide all that happens in the next step."""
        encoder_cache = self._shares.encoder_cache
        encoder_cache.next_plan(self._state.counters.num_steps + 1)
        running = self._queues.running
        budget = self._budget(now_s=now_s)
        if self._config.max_chunk_tokens:
            budget.num_prefills_ahead = len(running) - budget.num_decodes_ahead + self._num_admissible(budget)
        plan = PlanDraft(budget, now_s)
        if self._state.order.ages:
            self._reserve_for_oldest(budget)
        plan.draft_choice = self.draft_choice or self._drafts.choose(
            running, num_decodes=budget.num_decodes_ahead
        )
        if self._may_displace:
            self._admission.admit_urgent(plan)
        if self._may_give_turns:
            self._admission.admit_owed(plan)
        if self._config.batching is Batching.SEPARATE:
            self._plan_separately(plan)
        else:
            self._serve_running(plan)
            self._admission.admit_waiting(plan)
        if self._may_displace and self._state.order.ages:
            self._admission.note_held_up()
        self._draft_shares.ask(plan)
        self._has_chunks = bool(plan.chunks)
        if pending := encoder_cache.pending():
            plan.encoder_inputs = pending
            owed_s = encoder_cache.owed_s
            plan.encoder_slice_s, encoder_cache.owed_s = encoder_slice_s(self._state, plan, owed_s)
        # First the blocks that this very plan writes over.
        plan.swap_out = self._kv.complete_plan() + plan.swap_out
        return plan

    def _num_admissible(self, budget: SchedulingBudget) -> int:
        """Waiting sequences that may be admitted, judging by the last step."""
        if self._admission.wait_reason not in (WaitReason.STEP, WaitReason.TOKENS):
            return 0
        return min(len(self._queues.waiting), budget.remaining_seqs)

    def _reserve_for_oldest(self, budget: SchedulingBudget) -> None:
        """Let the running prompt that came first by age go on behind more urgent ones."""
        running = self._queues.running
        if budget.num_decodes_ahead < len(running):
            prefills = [seq for seq in running if seq.num_uncomputed_tokens > 1]
            if prefills:
                budget.reserve(min(prefills, key=_rank_of))

    def observe_step(self, plan: SchedulerOutput, seconds: float, waited_s: float) -> None:
        """Learn how long a plan took, and how long the worker had to wait for it; without tokens, nothing."""
        if not plan.num_scheduled_tokens:
            return
        num_decoded = len(plan.scheduled) + sum(map(len, plan.draft_token_ids.values()))
        has_prefill = plan.num_scheduled_tokens > num_decoded
        pause_s = seconds + waited_s if has_prefill and self._has_decodes(plan) else 0.0
        self._step_time.observe(plan.num_scheduled_tokens, seconds, has_prefill=has_prefill, pause_s=pause_s)
        if not has_prefill:
            self._drafts.observe_step(plan, seconds, waited_s)

    def _has_decodes(self, plan: SchedulerOutput) -> bool:
        """Whether sequences that have tokens already get the next, with drafts or without."""
        starts = {
            share.sequence_id: share.start
            for share in plan.scheduled
            if share.num_tokens == 1 + len(plan.draft_token_ids.get(share.sequence_id, ()))
        }
        return any(starts.get(seq.sequence_id, -1) >= seq.num_prompt_tokens for seq in self._queues.running)

    def note_memory_sufficed(self) -> None:
        """Learn that a step found enough memory."""
        self._step_limit.fitted()

    def note_memory_lacked(self, plan: SchedulerOutput) -> None:
        """Plan smaller steps: there was too little memory for `plan`."""
        self._step_limit.did_not_fit(plan.num_scheduled_tokens)

    def _budget(self, *, now_s: float) -> SchedulingBudget:
        return budget_for_step(self._state, self._limits(), now_s=now_s)

    def _limits(self) -> BudgetLimits:
        """Tokens that the device has memory for.

        More for a prompt that is to be computed at once and alone.
        """
        most, max_tokens = self._config.max_num_batched_tokens, self._step_limit.max_tokens
        if max_tokens < most and not self._queues.num_running and len(self._queues.waiting):
            head = self._queues.waiting.peek()
            if head.is_indivisible:
                max_tokens = max(max_tokens, head.num_tokens)
        # Chunks of a prompt are in all stages at once; a plan with much more than others would hold them up.
        return BudgetLimits(max_tokens, -(-(self._config.max_prefill_tokens or most) // self._num_stages))

    def _plan_separately(self, plan: PlanDraft) -> None:
        """Prefill alone if there is any to do and it is due, otherwise decodes alone."""
        num_decodes, plan.budget.num_decodes_ahead = plan.budget.num_decodes_ahead, 0
        self._serve_prefills(plan)
        self._delays_prompts = not self._prefill_is_due(plan.now_s)
        if not self._delays_prompts:
            self._admission.admit_waiting(plan)
        if not plan.chunks:
            plan.budget.num_decodes_ahead = num_decodes
            self._serve_running(plan)

    # The running queue, from the front.

    def _serve_running(self, plan: PlanDraft) -> None:
        running, budget = self._queues.running, plan.budget
        most_decodes = -(-len(running) // self._num_stages)
        place = 0
        while place < len(running) and budget.remaining_tokens > 0:
            seq = running[place]
            place += 1
            if plan.urgent and seq.sequence_id in plan.urgent:
                continue
            if self._num_stages > 1 and self._waits_for_stages(seq, plan, most_decodes):
                continue
            if self._passes_blocks:
                self._kv.pass_blocks(seq)
            if seq.num_tokens > seq.num_slots and not self._grow(seq, plan):
                break
            if seq.num_tokens - seq.num_computed_tokens == 1:
                self._shares.decode(seq, plan)
            else:
                self._shares.part(seq, plan)

    def _waits_for_stages(self, seq: Sequence, plan: PlanDraft, most_decodes: int) -> bool:
        """Whether its token is being sampled, or the plan has its part of the decodes.

        The others are for the next plans, so that each stage has one.
        """
        num_left = seq.num_tokens - seq.num_computed_tokens
        return num_left == 0 or (num_left == 1 and len(plan.decodes) >= most_decodes)

    def _serve_prefills(self, plan: PlanDraft) -> None:
        """Serve the running sequences that have more than one token to compute."""
        for seq in self._queues.running:
            is_prefill = seq.num_uncomputed_tokens > 1
            if is_prefill and plan.budget.remaining_tokens > 0 and seq.sequence_id not in plan.urgent:
                if self._passes_blocks and not self._move_window(seq, plan):
                    continue
                self._shares.part(seq, plan)

    def _move_window(self, seq: Sequence, plan: PlanDraft) -> bool:
        """Exchange blocks that the window passed for the blocks of the next share.

        False if others still share these, and no block is free: the sequence has to wait.
        """
        self._kv.pass_blocks(seq)
        fresh = self._kv.append(seq)
        if fresh:
            plan.new_blocks[seq.sequence_id] = fresh
        return fresh is not None

    def _grow(self, seq: Sequence, plan: PlanDraft) -> bool:
        """Get blocks for `seq`, from the back of the queue if need be; False if it was preempted or ended."""
        while (fresh := self._kv.append(seq)) is None:
            if len(self._queues.running) == 1:
                if seq.num_uncomputed_tokens == 1:
                    plan.budget.give_up_decode()
                # No other sequence holds blocks and it still does not fit: more memory will never come. A
                # token that is being sampled for it is reported first.
                if not self._state.in_flight.samples_for(seq.sequence_id):
                    plan.budget.give_back_slot()
                    self._finish(seq, FinishReason.LENGTH, "")
                return False
            behind = self._queues.behind(seq)
            victim = self._preemptor.choose_victim(behind) if behind else seq
            assert victim.sequence_id not in plan.urgent, "urgent ones left room for the growth of all others"
            self._preemptor.preempt(victim, plan, PreemptionCause.GROWTH, seq)
            if victim is seq:
                return False
        if fresh:
            plan.new_blocks[seq.sequence_id] = fresh
        return True

    def _prefill_is_due(self, now_s: float) -> bool:
        """Whether new prompts may interrupt decoding: they have waited for long enough to be worth it."""
        queues = self._queues
        if not self._config.prefill_delay_factor or not queues.running or not len(queues.waiting):
            return True
        waited_s = now_s - queues.waiting.peek().admitted_s
        return waited_s > self._config.prefill_delay_factor * self._step_time.last_prefill_s
