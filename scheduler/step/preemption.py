"""Who pays when memory runs short, and in which coin: recompute later, or copy to the host now.

Owns: the choice of victims for growth, the choice of the mode, and what a sequence leaves when it goes.
Never: when somebody has to go (planner.py, admission.py), or blocks on either side (kv_cache_manager.py).
Source: vLLM's first engine had both modes and chose by the number of sequences; here the cost decides.
"""

from scheduler.config import PreemptionMode, VictimChoice
from scheduler.messages import Preemption, PreemptionCause
from scheduler.sequence import Sequence, Status
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.scheduler_state import SchedulerState
from scheduler.step.step_time import StepTimeModel
from scheduler.step.token_shares import Shares

# How far from the back of the line it is looked for a cheaper victim.
_VICTIM_WINDOW = 8


class Preemptor:
    """Sends running sequences back to the waiting line."""

    def __init__(self, state: SchedulerState, shares: Shares, step_time: StepTimeModel) -> None:
        self._state = state
        self._shares = shares
        self._copy_s_per_block = state.config.copy_s_per_block
        self._step_time = step_time
        self.num_swap_space_full = 0
        self._mode = state.config.preemption_mode
        self._victim_choice = state.config.victim_choice
        self._kv = state.kv

    def choose_victim(self, behind: list[Sequence]) -> Sequence:
        """The one of `behind`, the unplanned part of the line in rank order, that makes room for growth.

        The last priority pays, and in it the sequence whose going loses the fewest tokens; one that has
        just come back is spared while there is another.
        """
        last = behind[-1]
        if self._victim_choice is VictimChoice.LAST:
            return last
        window = [seq for seq in behind[-_VICTIM_WINDOW:] if seq.priority == last.priority]
        return min(reversed(window), key=lambda seq: (seq.is_protected, self._num_tokens_at_stake(seq)))

    def send_away(
        self, victim: Sequence, plan: PlanDraft, cause: PreemptionCause, beneficiary: Sequence
    ) -> None:
        """Take its blocks; it returns to its old place among the waiting."""
        if victim.num_uncomputed_tokens == 1:
            plan.budget.give_up_decode()
        num_computed, num_free = victim.num_computed_tokens, self._kv.pool.num_free
        victim.num_reached_tokens = max(victim.num_reached_tokens, num_computed)
        is_swap = self.mode_for(victim) is PreemptionMode.SWAP
        if is_swap:
            plan.swap_out += self._kv.copy_out(victim)
        self._kv.free(victim)
        self._shares.forget_extras(victim)
        plan.released.append(victim.sequence_id)
        self._state.lines.send_back(victim, Status.SWAPPED if is_swap else Status.WAITING)
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

    def mode_for(self, victim: Sequence) -> PreemptionMode:
        """RECOMPUTE or SWAP. Counts when only the size of the swap space speaks against SWAP."""
        if self._mode is PreemptionMode.RECOMPUTE or not self._kv.swap_space.num_blocks:
            return PreemptionMode.RECOMPUTE
        num_blocks = self._num_written_blocks(victim)
        if self._mode is PreemptionMode.AUTO:
            swapping_s = 2 * num_blocks * self._copy_s_per_block  # out, and back in
            recomputing_s = self._num_tokens_at_stake(victim) * (self._step_time.slope_s or 0.0)
            if swapping_s >= recomputing_s:
                return PreemptionMode.RECOMPUTE
        if num_blocks > self._kv.swap_space.num_free:
            self.num_swap_space_full += 1
            return PreemptionMode.RECOMPUTE
        return PreemptionMode.SWAP

    def _num_written_blocks(self, seq: Sequence) -> int:
        return self._kv.blocks_for(seq.num_computed_tokens) - seq.num_passed_blocks

    def _num_tokens_at_stake(self, seq: Sequence) -> int:
        """Computed tokens in blocks that nobody else holds; the others will be found again."""
        num_shared = 0
        for block in seq.block_ids:
            if self._kv.pool.num_references(block) == 1:
                break
            num_shared += 1
        return max(seq.num_computed_tokens - num_shared * self._kv.block_size, 0)
