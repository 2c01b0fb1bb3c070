"""Preemption: which running sequence gives up its blocks, and whether its KV is recomputed or swapped.

Owns: the choice of victims, for growth and for a more urgent sequence; the choice of the mode; and the state
that a preempted sequence leaves behind.
Sources: vLLM's first engine had both modes and chose by the number of sequences; here the cost decides.
Displacement is asked for by users of priority scheduling: otherwise an urgent request waits until work of low
priority ends.

The rules of displacement, each against a fault that others have had:
- strictly less urgent victims only: two sequences of one priority never displace each other;
- all or nothing: unless the victims' places and blocks suffice, none is preempted;
- blocks that the other running sequences need to grow in this step are left alone, so nothing planned is
undone;
- a sequence that was preempted is protected until it has made some progress: no thrashing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from scheduler.blocks.block_demand import BlockDemand
from scheduler.blocks.pool import BlockPool
from scheduler.config import PreemptionMode
from scheduler.messages import BlockId, Preemption, PreemptionCause
from scheduler.policy import Standing
from scheduler.sequence import Sequence, Status
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.scheduler_state import SchedulerState

PROTECTED_TOKENS = 16
"""Tokens that a resumed sequence generates before it can be displaced again, so that bringing it back was not
for nothing. An urgent newcomer that finds all protected waits for as many."""

# Places from the back of the running queue among which a cheaper victim is looked for.
_VICTIM_WINDOW = 8


class Preemptor:
    """Moves running sequences back to the waiting queue.

    `forget_extras` drops the drafts and encoder outputs of one.
    """

    def __init__(self, state: SchedulerState, forget_extras: Callable[[Sequence], None]) -> None:
        self._state = state
        self._forget_extras = forget_extras
        self._copy_s_per_block = state.config.copy_s_per_block
        self._step_time = state.step_time
        self._mode = state.config.preemption_mode
        self._kv = state.kv

    def choose_victim(self, behind: list[Sequence]) -> Sequence:
        """Choose among `behind`, the unplanned part of the running queue, the one that makes room for growth.

        The least urgent give way, and among them the sequence that loses the fewest tokens; one that has just
        come back is spared while there is another.
        """
        window = self._state.order.equals_of_last(behind[-_VICTIM_WINDOW:])
        at_stake = self._kv.stakes.num_tokens_at_stake
        return min(reversed(window), key=lambda seq: (seq.is_protected, at_stake(seq)))

    def choose_displaced(
        self,
        displaceable: Iterator[Sequence],
        demand: BlockDemand,
        *,
        num_free_slots: int,
        num_kept_blocks: int = 0,
    ) -> list[Sequence] | None:
        """Choose the fewest of `displaceable`, maybe none, that make room for a sequence of this demand.

        None if there is no such choice. `num_kept_blocks` of the free blocks are another's.
        """
        kv, running = self._kv, self._state.queues.running
        num_free = max(kv.pool.num_free - num_kept_blocks, 0)
        num_growing = sum(kv.num_missing(seq) for seq in running if seq.num_tokens > seq.num_slots)
        gain = _Gain(kv.pool, set(demand.hit.device_blocks()))
        victims: list[Sequence] = []
        while num_free_slots + len(victims) < 1 or (
            num_free + gain.num_blocks < demand.num_from_free + num_growing
        ):
            victim = next((seq for seq in displaceable if not seq.is_protected), None)
            if victim is None:
                return None
            victims.append(victim)
            gain.add(victim)
            num_growing -= kv.num_missing(victim)
        return victims

    def num_tokens_lost(self, victim: Sequence, demand: BlockDemand) -> float:
        """Tokens of a prompt that cost as much as displacing `victim` for a sequence of this demand.

        It is computed again where neither a swap nor the prefix cache keeps it; a copy counts by its time.
        """
        num_blocks = self._kv.num_written_blocks(victim)
        if self._mode is not PreemptionMode.RECOMPUTE and 0 < num_blocks <= self._kv.swap_space.num_free:
            copies_s = 2 * num_blocks * self._copy_s_per_block
            copied = copies_s / self._step_time.slope_s if self._step_time.slope_s else 0.0
            if self._mode is PreemptionMode.SWAP:
                return copied
            return min(copied, self._kv.stakes.num_tokens_at_stake(victim))
        return self._kv.stakes.num_tokens_lost(victim, demand.num_from_free)

    def preempt(
        self, victim: Sequence, plan: PlanDraft, cause: PreemptionCause, beneficiary: Sequence
    ) -> None:
        """Take the blocks of `victim`, which returns to its old place among the waiting."""
        if victim.num_uncomputed_tokens == 1:
            plan.budget.give_up_decode()
        num_computed, num_free = victim.num_computed_tokens, self._kv.pool.num_free
        victim.num_reached_tokens = max(victim.num_reached_tokens, num_computed)
        is_swap = self._mode_for(victim) is PreemptionMode.SWAP
        if is_swap:
            plan.swap_out += self._kv.copy_out(victim)
        self._kv.free(victim)
        self._forget_extras(victim)
        plan.released.append(victim.sequence_id)
        if cause is PreemptionCause.DISPLACED:
            self._spend_age(victim, plan.now_s)
        self._state.queues.requeue(victim, Status.SWAPPED if is_swap else Status.WAITING)
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
        self._state.counters.note_preemption(preemption)

    def _spend_age(self, victim: Sequence, now_s: float) -> None:
        """Let a sequence that has had its turn wait as long as a new one of its priority for the next."""
        order = self._state.order
        if order.ages and victim.num_tokens >= victim.protected_until:
            victim.rank = order.rank(Standing(victim.priority, now_s, victim.admission))

    def _mode_for(self, victim: Sequence) -> PreemptionMode:
        """RECOMPUTE or SWAP. Counts when only the size of the swap space speaks against SWAP."""
        nothing_to_swap = not (self._kv.swap_space.num_blocks and victim.num_computed_tokens)
        if self._mode is PreemptionMode.RECOMPUTE or nothing_to_swap:
            return PreemptionMode.RECOMPUTE
        num_blocks = self._kv.num_written_blocks(victim)
        if self._mode is PreemptionMode.AUTO:
            swapping_s = 2 * num_blocks * self._copy_s_per_block  # out, and back in
            recomputing_s = self._kv.stakes.num_tokens_at_stake(victim) * (self._step_time.slope_s or 0.0)
            if swapping_s >= recomputing_s:
                return PreemptionMode.RECOMPUTE
        if num_blocks > self._kv.swap_space.num_free:
            self._state.counters.num_swap_space_full += 1
            return PreemptionMode.RECOMPUTE
        return PreemptionMode.SWAP


@dataclass(slots=True)
class _Gain:
    """Blocks that come free while victims are added: a shared block only with the last of its holders."""

    pool: BlockPool
    kept: set[BlockId]  # the candidate itself shares them
    num_blocks: int = 0
    dropped: Counter[BlockId] = field(default_factory=Counter)

    def add(self, victim: Sequence) -> None:
        for block in victim.held_blocks():
            self.dropped[block] += 1
            if self.dropped[block] == self.pool.num_references(block) and block not in self.kept:
                self.num_blocks += 1
