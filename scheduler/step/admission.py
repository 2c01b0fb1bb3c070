"""Admission: which waiting sequences join a step, and what the others wait for.

Owns: the order of admissions, bounded bypass, and the notes about a sequence that starts.
"""

from collections.abc import Callable
from itertools import takewhile
from math import inf

from scheduler.blocks.block_demand import AllocationStatus, BlockDemand
from scheduler.config import PrefixCaching
from scheduler.messages import FinishReason, PreemptionCause, SequenceStart, WaitReason
from scheduler.sequence import Sequence
from scheduler.step.budget import SchedulingBudget
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.preemption import PROTECTED_TOKENS, Preemptor
from scheduler.step.scheduler_state import SchedulerState
from scheduler.step.token_shares import TokenShares
from scheduler.tenant_ledger import PROMPT_TOKEN_COST

# Places behind a head that does not fit that are looked at although they seem to need too much: much of what
# they need may be in the prefix cache.
_BYPASS_WINDOW = 8

# Sequences with adapters in use that pass one which waits for a place for its own: more would keep it waiting
# for ever.
_ADAPTER_BYPASSES = 16

# Steps between two turns of tenants: a tenant that is owed service has waited for longer.
_STEPS_BETWEEN_TURNS = 8

# Reasons that concern the first in the queue; the others concern all.
_REASONS_OF_HEAD = (WaitReason.BLOCKS, WaitReason.ADAPTER, WaitReason.ENCODER)

# Part of the expected time that a prompt certainly takes: the steps it was learnt from may have been slow.
_SURE = 0.7
TOO_LATE = "computing its prompt would take longer than its time limit leaves"
"""Message to the caller: its limit for the first token or for all would run out (`_is_too_late`)."""


class Admission:
    """Admission of waiting sequences; `finish` ends one for which there can never be room."""

    def __init__(
        self,
        state: SchedulerState,
        shares: TokenShares,
        preemptor: Preemptor,
        *,
        finish: Callable[[Sequence, FinishReason, str], None],
    ) -> None:
        self._state = state
        self._config = state.config
        self._order = state.order
        self._kv = state.kv
        self._queues = state.queues
        self._shares = shares
        self._preemptor = preemptor
        self._finish = finish
        self._memory_without_room: tuple[int, ...] | None = None
        self._held_up_since = self._held_up_until = self._urgent_first_until = 0  # numbers of steps
        self.wait_reason = WaitReason.STEP
        """Reason why the waiting queue waited in the last step."""

    def admit_urgent(self, plan: PlanDraft) -> None:
        """Admit sequences that are strictly more urgent than running ones, which make room for them."""
        budget, waiting = plan.budget, self._queues.waiting
        while len(waiting) and self._is_more_urgent_than_some(seq := self._queues.most_urgent()):
            if any(preemption.sequence_id == seq.sequence_id for preemption in plan.preemptions):
                return  # a preempted sequence does not come back in the same step
            if self._obstacle(seq, budget) is not None:
                return  # places and blocks are all that displacing gives
            demand = self._demand(seq, budget)
            if self._is_too_late(seq, demand, plan.now_s):
                self._finish(seq, FinishReason.EXPIRED, TOO_LATE)
                continue
            if self._lacks_encoder(seq, demand):
                return
            victims = self._choose_displaced(seq, demand, budget)
            if victims is None or not self._has_displaced(
                victims, seq, demand, plan, PreemptionCause.DISPLACED
            ):
                return

    def note_held_up(self) -> None:
        """Note, once a step is planned, whether the turn of a less urgent one keeps an urgent one waiting.

        Behind that the urgent come first for as many steps, and for the length of a turn at least: many that
        grow old together would have their turns in a row, and the urgent wait for all of these.
        """
        if not len(self._queues.waiting):
            return
        less_urgent = self._order.displaced_by(self._queues.most_urgent(), self._queues.running)
        if any(seq.is_protected for seq in less_urgent):
            step = self._state.counters.num_steps
            if step > self._held_up_until:
                self._held_up_since = step
            self._held_up_until = step + 1
            num_steps = max(self._held_up_until - self._held_up_since, PROTECTED_TOKENS)
            self._urgent_first_until = self._held_up_until + num_steps

    def _first(self) -> Sequence:
        """First waiting sequence by rank; by urgency alone for some steps after the urgent were held up."""
        if self._state.counters.num_steps < self._urgent_first_until:
            return self._queues.most_urgent()
        return self._queues.waiting.peek()

    def admit_owed(self, plan: PlanDraft) -> None:
        """Admit the first in the queue if tenants with far more service than its own can make room."""
        has_waited = self.wait_reason in (WaitReason.PLACES, WaitReason.BLOCKS)
        if not has_waited or plan.preemptions or self._state.counters.num_steps % _STEPS_BETWEEN_TURNS:
            return
        if not len(self._queues.waiting):
            return
        seq, budget = self._queues.waiting.peek(), plan.budget
        if self._obstacle(seq, budget) is not None:
            return
        over_served = self._queues.over_served(seq)
        demand = self._demand(seq, budget)
        if not over_served or self._lacks_encoder(seq, demand) or self._is_too_late(seq, demand, plan.now_s):
            return
        # A lead that is larger than the loss: so no two tenants displace each other again and again.
        losses = {each.sequence_id: self._preemptor.num_tokens_lost(each, demand) for each in over_served}
        displaceable = [
            each for each in over_served if self._queues.lead(each, seq) >= losses[each.sequence_id]
        ]
        displaceable.sort(key=lambda each: (losses[each.sequence_id], -each.admission))
        victims = self._preemptor.choose_displaced(
            iter(displaceable), demand, num_free_slots=budget.remaining_seqs
        )
        if victims:
            self._has_displaced(victims, seq, demand, plan, PreemptionCause.FAIRNESS)

    def _has_displaced(
        self,
        victims: list[Sequence],
        seq: Sequence,
        demand: BlockDemand,
        plan: PlanDraft,
        cause: PreemptionCause,
    ) -> bool:
        """Give `seq` the place of `victims` and its share of the step; False if this step has none for it."""
        budget = plan.budget
        if any(victim.sequence_id in plan.urgent for victim in victims):
            return False  # a sequence that has a share of this step keeps it
        num_decodes = budget.num_decodes_ahead - sum(v.num_uncomputed_tokens == 1 for v in victims)
        room = budget.chunk_tokens(seq, num_decodes=num_decodes)
        if room < _smallest_share(seq) or self._would_delay_better(seq, demand, room, plan):
            return False
        self._kv.pin(demand)
        for victim in victims:
            budget.give_back_slot()
            self._preemptor.preempt(victim, plan, cause, seq)
        self._admit(seq, demand, plan)
        self._give_first(seq, self._shares.num_wanted(seq), plan)
        plan.urgent.add(seq.sequence_id)
        return True

    def _is_more_urgent_than_some(self, seq: Sequence) -> bool:
        return any(True for _ in self._order.displaced_by(seq, self._queues.running))

    def _choose_displaced(
        self, seq: Sequence, demand: BlockDemand, budget: SchedulingBudget
    ) -> list[Sequence] | None:
        """Sequences that give way to `seq`; None if it must wait.

        An older one may be the first in the queue. Then the place and the blocks that are free are kept for
        that one, which would otherwise wait for ever: `seq` gets only what it takes from running ones.
        """
        displaceable = self._order.displaced_by(seq, self._queues.running)
        head = self._first()
        if head is seq:
            return self._preemptor.choose_displaced(
                displaceable, demand, num_free_slots=budget.remaining_seqs
            )
        free_slots = max(budget.remaining_seqs - 1, 0)
        if self._awaits_token(head):  # what may be cached of it is not known yet
            num_kept = self._kv.most_blocks(head.num_tokens)
        else:
            num_kept = self._kv.demand(head).num_from_free
        victims = self._preemptor.choose_displaced(
            displaceable, demand, num_free_slots=free_slots, num_kept_blocks=num_kept
        )
        return victims or None

    def _would_delay_better(self, seq: Sequence, demand: BlockDemand, room: int, plan: PlanDraft) -> bool:
        """Whether prompts before it in the running queue would get less of the step for its chunk.

        Otherwise urgent ones that keep coming would stop an earlier one of their own priority.
        """
        before = takewhile(lambda each: each.running_rank < seq.running_rank, self._queues.running)
        unserved = [each for each in before if each.sequence_id not in plan.urgent]
        prefills = [each for each in unserved if each.num_uncomputed_tokens > 1]
        num_ahead = sum(self._shares.num_wanted(each) for each in prefills)
        if not num_ahead:
            return False
        wanted = min(self._shares.num_wanted(seq), seq.num_tokens - demand.hit.num_tokens)
        return room - num_ahead < wanted

    def skip_step(self) -> None:
        """Admit no sequence to this step; the waiting ones are looked at in the next."""
        self.wait_reason = WaitReason.STEP

    def compile_ahead(self) -> None:
        """Have the grammars of the next sequences compiled during steps."""
        uncompiled = self._queues.uncompiled
        while len(uncompiled):
            if not any(map(self._begins_to_compile, (uncompiled.peek(), uncompiled.most_urgent()))):
                return

    def _begins_to_compile(self, seq: Sequence) -> bool:
        """Have its grammar compiled, if that may begin."""
        compilations = self._queues.compilations
        if self._awaits_token(seq) or not compilations.has_time(seq):
            return False
        if not compilations.has_row:
            displaceable = next(self._order.displaceable(seq, compilations.compiled()), None)
            if displaceable is None:
                return False
            self._queues.give_up_row(displaceable)
        self._queues.compile(seq)
        return True

    def admit_waiting(self, plan: PlanDraft) -> None:
        if not len(self._queues.waiting):
            self.skip_step()
        elif plan.preemptions:
            # A preempted sequence is not passed by a newcomer, and does not come back in the same step.
            self.wait_reason = WaitReason.PREEMPTION
        else:
            self.wait_reason = self._admit_in_order(plan)

    def _admit_in_order(self, plan: PlanDraft) -> WaitReason:
        """Admit in order of rank, until one has to wait; returns what it waits for."""
        budget = plan.budget
        if self._memory_without_room is not None and self._memory_without_room == self._memory_state():
            return WaitReason.BLOCKS  # looking again would find the same
        self._memory_without_room = None
        while len(self._queues.waiting):
            if budget.remaining_seqs <= 0:
                return WaitReason.PLACES
            seq = self._first()
            reason = self._obstacle(seq, budget)
            if reason in (WaitReason.TOKENS, WaitReason.PREEMPTION):
                return reason
            demand = self._demand(seq, budget)
            if self._allocation_status(demand) is AllocationStatus.NEVER:
                # It grew while it ran, was preempted, and now outgrows even the empty pool.
                self._finish(seq, FinishReason.LENGTH, "")
                continue
            if self._is_too_late(seq, demand, plan.now_s):
                self._finish(seq, FinishReason.EXPIRED, TOO_LATE)
                continue
            reason = reason or self._shortage(seq, demand)
            if reason is not None:
                bypassing = self._find_passing(seq, budget, reason)
                if bypassing is None:
                    self._note_lack_of_room(reason, budget)
                    return reason
                seq, demand = bypassing
            self._admit(seq, demand, plan)
            self._give_first(seq, self._shares.num_shared(seq, budget), plan)
        return WaitReason.STEP

    def reason_of(self, seq: Sequence, place: int) -> WaitReason:
        """Reason why a sequence with `place` ahead of it in the line waits, as far as it is cheap to say."""
        if self._queues.lacks_grammar(seq):
            return WaitReason.GRAMMAR
        if place == 0 or self.wait_reason not in _REASONS_OF_HEAD:
            return self.wait_reason
        if seq.adapter and not self._has_place_for_adapter(seq.adapter):
            return WaitReason.ADAPTER
        if self.wait_reason is WaitReason.ENCODER and seq.encoder_inputs:
            return WaitReason.ENCODER
        if self._kv.most_blocks(seq.num_tokens) > self._kv.pool.num_free:
            return WaitReason.BLOCKS
        return WaitReason.ORDER

    def _is_too_late(self, seq: Sequence, demand: BlockDemand, now_s: float) -> bool:
        """Whether it could not have its first token within its limits, even alone, as fast as recent steps.

        Such a prompt is not computed: it would take the time from others, and expire all the same.
        """
        limits = seq.time_limits
        limit_s = min(limits.first_token_s, limits.total_s)
        if limit_s == inf or seq.num_output_tokens:
            return False
        slope_s = self._state.step_time.slope_s
        num_to_compute = seq.num_tokens - demand.hit.num_tokens
        return slope_s is not None and now_s + _SURE * slope_s * num_to_compute > seq.admitted_s + limit_s

    def _obstacle(self, seq: Sequence, budget: SchedulingBudget) -> WaitReason | None:
        """Reason that keeps a waiting sequence out of this step, however much memory is free."""
        if self._awaits_token(seq):
            return WaitReason.PREEMPTION
        if budget.chunk_tokens(seq, num_decodes=0) < _smallest_share(seq):
            return WaitReason.TOKENS
        if not self._may_hash(seq, budget):
            return WaitReason.TOKENS
        has_place = not seq.adapter or self._has_place_for_adapter(seq.adapter)
        return None if has_place else WaitReason.ADAPTER

    def _may_hash(self, seq: Sequence, budget: SchedulingBudget) -> bool:
        return budget.may_hash(self._kv.index.num_unhashed(seq))

    def _demand(self, seq: Sequence, budget: SchedulingBudget) -> BlockDemand:
        """Look up what it needs, after `_obstacle`."""
        budget.remaining_hashed_tokens -= self._kv.index.num_unhashed(seq)
        return self._kv.demand(seq)

    def _awaits_token(self, seq: Sequence) -> bool:
        """Whether a token of before its preemption is being sampled: the worker must be given all of them."""
        return bool(seq.num_preemptions) and self._state.in_flight.samples_for(seq.sequence_id)

    def _shortage(self, seq: Sequence, demand: BlockDemand) -> WaitReason | None:
        """Kind of memory of which there is too little for it."""
        if self._allocation_status(demand) is not AllocationStatus.OK:
            return WaitReason.BLOCKS
        return WaitReason.ENCODER if self._lacks_encoder(seq, demand) else None

    def _allocation_status(self, demand: BlockDemand) -> AllocationStatus:
        return self._kv.can_allocate(demand, num_running=self._queues.num_running)

    def _lacks_encoder(self, seq: Sequence, demand: BlockDemand) -> bool:
        """Whether it begins with an input for whose output there is no room."""
        if not seq.encoder_inputs:
            return False
        return not self._shares.encoder_cache.has_room(seq, demand.hit.num_tokens)

    def _has_place_for_adapter(self, adapter: str) -> bool:
        in_use = self._adapters_in_use()
        return adapter in in_use or len(in_use) < self._config.max_adapters

    def _adapters_in_use(self) -> set[str]:
        return {seq.adapter for seq in self._queues.running if seq.adapter}

    def _memory_state(self) -> tuple[int, ...]:
        """Facts that decide whether any waiting sequence fits."""
        waiting = self._queues.waiting
        head = self._first().admission if len(waiting) else 0
        return (
            self._kv.pool.num_free,
            self._kv.index.num_changes,
            self._queues.num_running,
            len(waiting),
            self._queues.num_arrivals,  # one may have left and another come
            head,
        )

    def _find_passing(
        self, head: Sequence, budget: SchedulingBudget, reason: WaitReason
    ) -> tuple[Sequence, BlockDemand] | None:
        """A sequence that passes the head, which waits for a reason of its own; None if there is none."""
        is_for_adapter = reason is WaitReason.ADAPTER
        passing = (self._find_beside_adapter if is_for_adapter else self._find_bypassing)(head, budget)
        if passing is not None and (not is_for_adapter or passing[0].adapter):
            head.num_bypasses += 1
        return passing

    def _find_bypassing(
        self, head: Sequence, budget: SchedulingBudget
    ) -> tuple[Sequence, BlockDemand] | None:
        """A sequence behind a head that does not fit yet, which does; None once enough have passed it."""
        if head.num_bypasses >= self._config.max_bypasses:
            return None
        for seq in self._candidates(head):
            if self._obstacle(seq, budget) is None:
                demand = self._demand(seq, budget)
                if self._shortage(seq, demand) is None:
                    return seq, demand
        return None

    def _find_beside_adapter(
        self, head: Sequence, budget: SchedulingBudget
    ) -> tuple[Sequence, BlockDemand] | None:
        """The first behind a head without a place for its adapter that needs none; None if it has to wait.

        Sequences without an adapter take nothing that the head waits for, and pass it freely. Of those that
        need no place the order is kept: the first is not passed, whatever it lacks.
        """
        may_pass = head.num_bypasses < _ADAPTER_BYPASSES
        seq = self._queues.first_with({"", *self._adapters_in_use()} if may_pass else {""})
        if seq is None or self._obstacle(seq, budget) is not None:
            return None
        demand = self._demand(seq, budget)
        return None if self._shortage(seq, demand) is not None else (seq, demand)

    def _candidates(self, head: Sequence) -> list[Sequence]:
        """Sequences behind the head that may fit: the next few, then those that need least."""
        nearest = [seq for seq in self._queues.waiting.after_first(_BYPASS_WINDOW) if seq is not head]
        by_need = self._queues.candidates(self._kv.pool.num_free)
        return [*nearest, *(seq for seq in by_need if seq is not head and seq not in nearest)]

    def _note_lack_of_room(self, reason: WaitReason, budget: SchedulingBudget) -> None:
        """Remember that none was admitted: the next step need not look again, if only memory decides."""
        if reason is not WaitReason.BLOCKS:
            return
        head = self._first()
        may_be_passed = head.num_bypasses < self._config.max_bypasses
        looked_at = self._candidates(head) if may_be_passed else [head]
        if all(self._may_hash(seq, budget) and not self._needs_more_than_blocks(seq) for seq in looked_at):
            self._memory_without_room = self._memory_state()

    def _needs_more_than_blocks(self, seq: Sequence) -> bool:
        may_be_sampled = bool(seq.num_preemptions and self._state.in_flight)
        extras = seq.adapter or seq.encoder_inputs or seq.has_grammar
        return bool(extras or seq.is_indivisible or may_be_sampled)

    def _admit(self, seq: Sequence, demand: BlockDemand, plan: PlanDraft) -> None:
        copies = self._kv.allocate(seq, demand)
        plan.swap_in += copies.swap_in
        plan.copies += copies.copies
        self._queues.admit(seq, now_s=plan.now_s)
        plan.budget.take_slot()
        seq.protected_until = seq.num_tokens + PROTECTED_TOKENS
        if not seq.num_preemptions:
            self._note_start(seq, demand, plan.now_s)
        plan.new_sequences.append(seq.as_new())
        if seq.encoder_inputs:
            self._shares.encoder_cache.claim(seq)

    def _give_first(self, seq: Sequence, num_wanted: int, plan: PlanDraft) -> None:
        """Give an admitted sequence its share; one that begins with an input to encode has none yet."""
        share = self._shares.take(seq, num_wanted, plan.budget)
        if share:
            self._shares.chunk(seq, share, plan)

    def _note_start(self, seq: Sequence, demand: BlockDemand, now_s: float) -> None:
        counters = self._state.counters
        seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        if seq.reads_prefix_cache and self._config.prefix_caching is PrefixCaching.ON:
            counters.num_prefix_queries += seq.num_prompt_tokens
        counters.num_prefix_hits += seq.num_cached_tokens
        hit = demand.hit
        if hit.bounded_by is not None and hit.num_kept_tokens > hit.num_tokens:
            seq.num_lost_tokens = hit.num_kept_tokens - hit.num_tokens
            seq.lost_to = self._config.groups[hit.bounded_by].name
            counters.num_restore_lost_tokens += seq.num_lost_tokens
        num_places = max([len(group.host) for group in hit.groups])
        counters.num_prefix_host_hits += num_places * self._config.block_size
        # Once: a preemption is not the tenant's doing.
        num_to_compute = seq.num_prompt_tokens - seq.num_cached_tokens
        self._queues.charge(seq, PROMPT_TOKEN_COST * num_to_compute)
        seq.pending_start = SequenceStart(
            now_s - seq.admitted_s, seq.num_cached_tokens, seq.num_lost_tokens, seq.lost_to
        )


def _smallest_share(seq: Sequence) -> int:
    """Fewest tokens of a step that are worth admitting a sequence for."""
    return seq.num_tokens if seq.is_indivisible else 1
