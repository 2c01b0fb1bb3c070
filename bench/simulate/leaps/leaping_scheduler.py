"""Scheduler of a simulator: steady decodes are set aside, and each plan leaves a token and a place to them.

Owns: what a step is and costs with sequences that are not in the running queue.
Never: decides which these are (steady_decodes.py). With none set aside it is the scheduler of a server.
"""

from collections.abc import Callable
from dataclasses import replace

from bench.simulate.leaps.steady_decodes import SteadyDecodes, SteadyQueues
from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason, SchedulerOutput
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.step.budget import SchedulingBudget
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.planner import Planner
from scheduler.step.scheduler_state import SchedulerState
from scheduler.step.token_shares import TokenShares


class LeapingScheduler(Scheduler):
    """A scheduler whose queues, shares and planner know of steady decodes; each token is `token_id`."""

    def __init__(self, config: SchedulerConfig, *, token_id: int) -> None:
        super().__init__(config)
        self._queues = queues = SteadyQueues(config, self._state.order)
        self._state = replace(self._state, queues=queues)
        self._shares = TokenShares(self._state)
        self._planner = _LeapingPlanner(self._state, self._shares, queues, finish=self._finish)
        self.steady = SteadyDecodes(self._state, queues, token_id, end=self._end)

    def _is_step(self, plan: PlanDraft) -> bool:
        return self.steady.num > 0 or super()._is_step(plan)

    def _counted(self, plan: SchedulerOutput) -> SchedulerOutput:
        self._counters.num_scheduled_tokens += self.steady.num
        return super()._counted(plan)


class _LeapingPlanner(Planner):
    """A planner that gives a token to each sequence in `queues` that is set aside, without a share."""

    def __init__(
        self,
        state: SchedulerState,
        shares: TokenShares,
        queues: SteadyQueues,
        *,
        finish: Callable[[Sequence, FinishReason, str], None],
    ) -> None:
        super().__init__(state, shares, finish=finish)
        self._steady_queues = queues

    def _budget(self, *, now_s: float) -> SchedulingBudget:
        budget, num_steady = super()._budget(now_s=now_s), self._steady_queues.num_steady
        budget.remaining_tokens -= num_steady
        budget.num_decodes_ahead -= num_steady
        return budget

    def observe_step(self, plan: SchedulerOutput, seconds: float, waited_s: float) -> None:
        num_steady = self._steady_queues.num_steady
        if not num_steady:
            super().observe_step(plan, seconds, waited_s)
            return
        has_prefill = plan.num_scheduled_tokens > len(plan.scheduled)
        pause_s = seconds + waited_s if has_prefill else 0.0
        num_tokens = plan.num_scheduled_tokens + num_steady
        self._step_time.observe(num_tokens, seconds, has_prefill=has_prefill, pause_s=pause_s)
