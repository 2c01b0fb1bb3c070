"""Pace of prompts: how much of a step prefill may have while other sequences decode.

Owns: the rules that keep the time between tokens, and that let prompts and encoding go on in a crowd.
"""

from math import inf

from scheduler.config import SchedulerConfig
from scheduler.queues.request_queues import RequestQueues
from scheduler.step.budget import BudgetLimits, SchedulingBudget
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.scheduler_state import SchedulerState

# Least share of prefill under a target for the time between tokens: it goes on, if slowly.
_MIN_CHUNK_TOKENS = 16

# Part of a target: decodes that take more of it leave prefill too little for the target to be kept.
_MOST_FOR_DECODES = 2 / 3

# Sequences that run and wait, from which on they are a crowd. A prompt computed whole makes each of the
# others wait once, for as long as it takes; one that is cut has its first token later by a decode step for
# each chunk. Both grow with its length: so the number of others decides.
_SMALLEST_CROWD = 7
# Beyond the first number the share of prefill grows; from the second on it is that of a large crowd: where
# decodes take half of each step, the queue of such a crowd grows.
_GROWING_CROWD, _LARGE_CROWD = 8, 12
# The share of a large crowd is cut so that a step takes this at most, but not below this part of the step:
# decodes of a slow machine would take four times as long and more.
_LONGEST_OF_CROWD_S, _UNCUT_PREFILL_SHARE = 0.6, 0.6

# Encoding in a step that others wait for makes their tokens come later by this part of it, in the mean.
# Without others, messages are read after the longest slice.
_ENCODER_PART, _SHORTEST_SLICE_S, _LONGEST_SLICE_S = 0.2, 0.001, 0.2
# A slice that took too long costs this many at most: some encoding goes on, however long its parts are.
_MOST_SLICES_OWED = 3


def budget_for_step(state: SchedulerState, limits: BudgetLimits, *, now_s: float) -> SchedulingBudget:
    """Budget within `limits`, with fewer tokens where decodes would otherwise miss their target."""
    config, queues, step_time = state.config, state.queues, state.step_time
    num_decodes = queues.num_decodes()
    most_tokens = limits.max_tokens
    if config.target_itl_s != inf and (num_decodes or _decodes_in_flight(config, queues)):
        decodes_s, target_s = step_time.seconds(num_decodes), _step_part_s(config, config.target_itl_s)
        share = _prefill_share(config, queues, decodes_s, target_s, now_s=now_s)
        expected_s = max(target_s / step_time.headroom, decodes_s / (1 - share))
        if _num_there(queues) < _SMALLEST_CROWD:
            # Without headroom, which would leave a few tokens of a prompt to a step of their own.
            expected_s = max(expected_s, _step_part_s(config, config.uncrowded_itl_s))
        within = step_time.tokens_within(expected_s)
        if within is not None:
            most = max(within, num_decodes + _MIN_CHUNK_TOKENS)
            limits = limits._replace(max_tokens=min(limits.max_tokens, most))
    free_seqs = config.max_num_seqs - queues.num_running
    num_set_aside = most_tokens - limits.max_tokens
    return SchedulingBudget(*limits, free_seqs, num_decodes, num_set_aside)


def encoder_slice_s(state: SchedulerState, plan: PlanDraft, owed_s: float) -> tuple[float, float]:
    """Time for encoding in a step, a part of it where others wait for its tokens; and what is owed then.

    `owed_s` is what slices before took beyond theirs.
    """
    if not plan.decodes:
        return min(state.config.target_itl_s, _LONGEST_SLICE_S), 0.0
    num_tokens = len(plan.decodes) + sum(share.num_tokens for share in plan.chunks)
    # Steps of equal numbers of tokens have a duration and no slope.
    step_s = state.step_time.seconds(num_tokens) or state.step_time.base_s
    part_s = max(_ENCODER_PART * step_s, _SHORTEST_SLICE_S)
    left_s = part_s - min(owed_s, _MOST_SLICES_OWED * part_s)
    return max(left_s, 0.0), max(-left_s, 0.0)


def _decodes_in_flight(config: SchedulerConfig, queues: RequestQueues) -> bool:
    """Whether sequences in other plans wait for this one to pass, as it does for stages alone."""
    return config.num_stages > 1 and queues.has_replies()


def _step_part_s(config: SchedulerConfig, target_s: float) -> float:
    """Time that a step may take for this target to be kept.

    With several stages a sequence is in one plan at a time, and gets its next token once all that were made
    before have passed.
    """
    return target_s / (config.max_plans_in_flight if config.num_stages > 1 else 1)


def _num_there(queues: RequestQueues) -> int:
    """Sequences that run and wait; not those that wait for their grammar, which need no tokens yet."""
    return queues.num_running + len(queues.waiting)


def _least_prefill_share(config: SchedulerConfig, num_there: int, decodes_s: float) -> float:
    """Least share of prefill, which grows in proportion with a crowd until it is a large one."""
    least, most = config.least_prefill_share, config.large_crowd_prefill_share
    if most is None:
        return least
    part = (num_there - _GROWING_CROWD) / (_LARGE_CROWD - _GROWING_CROWD)
    share = least + (most - least) * min(max(part, 0.0), 1.0)
    uncut = max(least, _UNCUT_PREFILL_SHARE)
    return min(share, max(uncut, 1 - decodes_s / _step_part_s(config, _LONGEST_OF_CROWD_S)))


def _prefill_share(
    config: SchedulerConfig, queues: RequestQueues, decodes_s: float, target_s: float, *, now_s: float
) -> float:
    """Part of the step's time that prefill gets, whatever the target.

    All of its least share where the target, without headroom, would leave it little. Otherwise in proportion
    to the longest wait: of prompts that are being computed, and of the first in the queue by rank. A sequence
    with tokens already, which was preempted, does not count.
    """
    share = _least_prefill_share(config, _num_there(queues), decodes_s)
    patience_s = config.prefill_patience_s
    if not share or not patience_s or decodes_s > _MOST_FOR_DECODES * target_s:
        return share
    prefills = [seq for seq in queues.running if seq.num_tokens - seq.num_computed_tokens > 1]
    if len(queues.waiting):
        prefills.append(queues.waiting.peek())
    since_s = [seq.admitted_s for seq in prefills if not seq.num_output_tokens]
    return share * min((now_s - min(since_s, default=now_s)) / patience_s, 1.0)
