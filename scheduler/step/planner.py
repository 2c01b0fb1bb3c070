"""One step: who gets a share of it, who is admitted, who has to go.

Owns: the order of these decisions. Each touches a sequence at most once, so that nothing planned is undone.
Never: who of the waiting line comes in (admission.py), what a share holds (token_shares.py), what came of a
step,
or how a sequence ends (scheduler.py).

The running line is kept in rank order. It is served from the front; whoever lacks a block takes those of
the back. So the worst pays first:

    served -->                               <-- preempted
    [ best, ..., here, ........, worse, worst ]

A waiting sequence that is strictly more urgent than a running one does not queue behind it: before the
line is served it may send some of its back away (displacement.py), if that is enough. Who is sent away
keeps its rank, and returns from the waiting line by recompute, or from the swap space (preemption.py).
"""

from collections.abc import Callable

from scheduler.config import Batching, Displacement, SchedulingPolicy
from scheduler.messages import FinishReason, PreemptionCause, WaitReason
from scheduler.sequence import Sequence
from scheduler.step.admission import Admission
from scheduler.step.budget import StepLimits, budget_for_step
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.preemption import Preemptor
from scheduler.step.scheduler_state import SchedulerState
from scheduler.step.step_limit import StepLimit
from scheduler.step.step_time import StepTimeModel
from scheduler.step.token_shares import Shares


class Planner:
    """Plans one step after the other over the lines of a scheduler.

    `finish` ends a sequence for which there can never be room.
    """

    def __init__(self, state: SchedulerState, *, finish: Callable[[Sequence, FinishReason], None]) -> None:
        self._state = state
        self._config = state.config
        self._kv = state.kv
        self._lines = state.lines
        self._finish = finish
        self.step_time = StepTimeModel()
        self.step_limit = StepLimit(state.config.max_num_batched_tokens)
        self.shares = Shares(state)
        self.preemptor = Preemptor(state, self.shares, self.step_time)
        self._admission = Admission(state, self.shares, self.preemptor, finish=finish)
        self._has_window = self._kv.reach.is_limited
        self._may_displace = (
            self._config.policy is SchedulingPolicy.PRIORITY and self._config.displacement is Displacement.ON
        )

    @property
    def wait_reason(self) -> WaitReason:
        """What the waiting line waited for in the last step."""
        return self._admission.wait_reason

    def plan(self, *, now_s: float) -> PlanDraft:
        """Everything that happens in the next step."""
        if self._config.max_encoder_tokens:
            self.shares.encoder_cache.next_plan()
        running = self._lines.running
        budget = budget_for_step(self._config, running, self.step_time, self._limits())
        plan = PlanDraft(budget, now_s)
        if self._may_displace:
            self._admission.admit_urgent(plan)
        if self._config.batching is Batching.SEPARATE:
            self._plan_separately(plan)
        else:
            self._serve_running(plan)
            self._admission.admit_waiting(plan)
        # First what this very plan writes over.
        plan.swap_out = self._kv.complete_plan() + plan.swap_out
        return plan

    def _limits(self) -> StepLimits:
        """What the device has memory for; or more, for a prompt that is to be computed at once and alone."""
        most, max_tokens = self._config.max_num_batched_tokens, self.step_limit.max_tokens
        if max_tokens < most and not self._lines.running and len(self._lines.waiting):
            head = self._lines.waiting.peek()
            if head.is_indivisible:
                max_tokens = max(max_tokens, head.num_tokens)
        return StepLimits(max_tokens, self._config.max_prefill_tokens or most)

    def _plan_separately(self, plan: PlanDraft) -> None:
        """Prefill alone if there is any to do and it is due, else decodes alone."""
        num_decodes, plan.budget.num_decodes_ahead = plan.budget.num_decodes_ahead, 0
        self._serve_prefills(plan)
        if num_decodes and not plan.chunks and self.wait_reason is WaitReason.GRAMMAR:
            # A crowd of grammars comes in few by few: between them decodes have their turn.
            self._admission.pass_over()
        elif self._prefill_is_due(plan.now_s):
            self._admission.admit_waiting(plan)
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
                self.shares.decode(seq, plan)
            else:
                self.shares.part(seq, plan)

    def _serve_prefills(self, plan: PlanDraft) -> None:
        """Only those who have more than one token to compute."""
        for seq in self._lines.running:
            is_prefill = seq.num_uncomputed_tokens > 1
            if is_prefill and plan.budget.remaining_tokens > 0 and seq.sequence_id not in plan.urgent:
                if self._has_window and not self._move_window(seq, plan):
                    continue
                self.shares.part(seq, plan)

    def _move_window(self, seq: Sequence, plan: PlanDraft) -> bool:
        """Blocks for its next share, in exchange for those that the window passed.

        False if others still share these, and nothing else is free: it has to wait.
        """
        self._kv.pass_blocks(seq)
        fresh = self._kv.append(seq)
        if fresh:
            plan.new_blocks[seq.sequence_id] = fresh
        return fresh is not None

    def _grow(self, seq: Sequence, plan: PlanDraft) -> bool:
        """Blocks for `seq`, at the expense of the back of the line if need be; False if it had to go."""
        while (fresh := self._kv.append(seq)) is None:
            if len(self._lines.running) == 1:
                if seq.num_uncomputed_tokens == 1:
                    plan.budget.give_up_decode()
                # Everybody else is gone and it still does not fit: more memory will never come. But what
                # is being drawn for it is told first.
                if not self._state.in_flight.draws_for(seq.sequence_id):
                    plan.budget.give_back_slot()
                    self._finish(seq, FinishReason.LENGTH)
                return False
            behind = self._lines.behind(seq)
            victim = self.preemptor.choose_victim(behind) if behind else seq
            assert victim.sequence_id not in plan.urgent, "the urgent left room for everybody's growth"
            self.preemptor.send_away(victim, plan, PreemptionCause.GROWTH, seq)
            if victim is seq:
                return False
        if fresh:
            plan.new_blocks[seq.sequence_id] = fresh
        return True

    def _prefill_is_due(self, now_s: float) -> bool:
        """Whether newcomers may interrupt decoding: they have waited for long enough to be worth it."""
        if not self._config.prefill_delay_factor or not self._lines.running or not len(self._lines.waiting):
            return True
        waited_s = now_s - self._lines.waiting.peek().admitted_s
        return waited_s > self._config.prefill_delay_factor * self.step_time.last_prefill_s
