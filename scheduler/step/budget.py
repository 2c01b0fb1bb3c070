"""Budget of one step: tokens, slots and tokens to look up.

Owns: how much a step may have, on a device that has run out of memory too, and what is left of it while it is
planned.
Never: what becomes of a step that found too little memory (rollback.py).
"""

from math import inf
from typing import NamedTuple

from scheduler.config import SchedulerConfig
from scheduler.queues.request_queues import RequestQueues
from scheduler.sequence import Sequence
from scheduler.step.step_time import StepTimeModel

# Least share of prefill under a target for the time between tokens: it goes on, if slowly.
_MIN_CHUNK_TOKENS = 16

# Part of a target: decodes that take more of it leave prefill too little for the target to be kept.
_MOST_FOR_DECODES = 2 / 3

# Sequences that run and wait, from which on they are a crowd. A prompt computed whole makes each of the
# others wait once, for as long as it takes; one that is cut has its first token later by a decode step for
# each chunk. Both grow with its length: so the number of others decides.
_SMALLEST_CROWD = 7
# Beyond so many the share of prefill grows, and from so many on it is that of a large crowd: where decodes
# take half of each step, the queue of such a crowd grows.
_GROWING_CROWD, _LARGE_CROWD = 8, 12
# The share of a large crowd is cut so that a step takes this at most, but not below this part of the step:
# decodes of a slow machine would take four times as long and more.
_LONGEST_OF_CROWD_S, _UNCUT_PREFILL_SHARE = 0.6, 0.6

# Part of the prefill of a step, one in so many, for the prompt that has waited longest: more urgent ones that
# keep coming slow it down and do not stop it.
_RESERVED_PART = 8

_MOST_HASHED_TOKENS = 128 * 1024
"""Tokens of waiting sequences for which a step computes keys: 16 ms. Others wait for the next step."""

SMALLEST_CHUNK_TOKENS = 64
"""A sequence that is alone in its step and finds too little memory even for these few tokens is failed."""

# In a row. So a limit that is too high costs one step in a few hundred.
_STEPS_UNTIL_DOUBLED = 256


class BudgetLimits(NamedTuple):
    """Most tokens of a step."""

    max_tokens: int
    max_prefill_tokens: int
    """Most of these for prompts; more than `max_tokens` is no limit."""


class StepLimit:
    """Most tokens of a step: the operator's limit, until a step finds too little memory.

    Such a step halves it, and many that find enough double it again.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._num_that_fitted = 0
        self.max_tokens = most_tokens

    def fitted(self) -> None:
        """Note a step that found enough memory."""
        if self.max_tokens == self._most_tokens:
            return
        self._num_that_fitted += 1
        if self._num_that_fitted >= _STEPS_UNTIL_DOUBLED:
            self._num_that_fitted = 0
            self.max_tokens = min(2 * self.max_tokens, self._most_tokens)

    def did_not_fit(self, num_tokens: int) -> None:
        """Note a step of `num_tokens` that found too little."""
        self._num_that_fitted = 0
        self.max_tokens = max(min(self.max_tokens, num_tokens) // 2, 1)


class SchedulingBudget:
    """Tokens to compute and slots to fill in the step being planned.

    A step is planned in one pass from the front of the queue, and nothing planned is undone; so the
    budget only falls.
    """

    __slots__ = (
        "has_chunks",
        "num_decodes_ahead",
        "num_prefills_ahead",
        "remaining_hashed_tokens",
        "remaining_prefill_tokens",
        "remaining_seqs",
        "remaining_tokens",
        "reserved_for",
        "reserved_tokens",
    )

    def __init__(self, limits: BudgetLimits, *, free_seqs: int, num_decodes: int) -> None:
        self.remaining_tokens = limits.max_tokens
        self.remaining_prefill_tokens = limits.max_prefill_tokens
        """Most of these for prompts."""
        self.has_chunks = False
        self.remaining_seqs = free_seqs
        """Slots for sequences that are not running yet."""
        self.remaining_hashed_tokens = _MOST_HASHED_TOKENS
        """Tokens whose keys may still be computed, to look them up; below 0 if the first took more."""
        self.num_decodes_ahead = num_decodes
        """Running sequences not yet planned that need one token each; it is set aside for them."""
        self.num_prefills_ahead = 1
        """Prompts that may still want a part of this step; counted where one may not take all of it."""
        self.reserved_tokens = 0
        self.reserved_for: Sequence | None = None
        """Prefill that gets so many tokens, whatever stands before it."""

    def take_decode(self) -> None:
        self.remaining_tokens -= 1
        self.num_decodes_ahead -= 1

    def take_chunk(self, seq: Sequence, num_wanted: int) -> int:
        """Take the share of a prefill: what it wants, cut to what the decodes leave; 0 if that is nothing.

        Tokens that already flow must not stall behind a long prompt (Sarathi-Serve, arXiv:2403.02310).
        """
        share = min(num_wanted, self.chunk_tokens(seq, num_decodes=self.num_decodes_ahead))
        if share <= 0:
            return 0
        self.remaining_tokens -= share
        self.remaining_prefill_tokens -= share
        self.has_chunks = True
        self.num_prefills_ahead -= 1
        if seq is self.reserved_for:
            self.reserved_for, self.reserved_tokens = None, 0
        return share

    def equal_part(self) -> int:
        """Part of each prompt, if those that may still come share what is left."""
        room = min(self.remaining_tokens - self.num_decodes_ahead, self.remaining_prefill_tokens)
        return room // max(self.num_prefills_ahead, 1)

    def reserve(self, seq: Sequence) -> None:
        """Set a part of what prefill may have aside for `seq`."""
        room = min(self.remaining_tokens - self.num_decodes_ahead, self.remaining_prefill_tokens)
        self.reserved_for, self.reserved_tokens = seq, min(room // _RESERVED_PART, seq.num_uncomputed_tokens)

    def chunk_tokens(self, seq: Sequence, *, num_decodes: int) -> int:
        """Longest chunk that the step has room for beside `num_decodes`; 0 or less is none.

        A prompt that is computed at once or not at all may be longer than the part of prompts, if it is the
        first.
        """
        room = self.remaining_tokens - num_decodes
        if seq.is_indivisible and not self.has_chunks:
            return room
        room = min(room, self.remaining_prefill_tokens)
        return room if seq is self.reserved_for else room - self.reserved_tokens

    def take_slot(self) -> None:
        self.remaining_seqs -= 1

    def may_hash(self, num_tokens: int) -> bool:
        """Whether keys of so many more tokens may be computed. The first sequence may always have its own."""
        return (
            num_tokens <= self.remaining_hashed_tokens or self.remaining_hashed_tokens == _MOST_HASHED_TOKENS
        )

    def give_back_slot(self) -> None:
        """Note that a running sequence ended or was preempted while the step was planned."""
        self.remaining_seqs += 1

    def give_up_decode(self) -> None:
        """Note that a sequence left the queue before it came to the token set aside for it."""
        self.num_decodes_ahead -= 1


def budget_for_step(
    config: SchedulerConfig,
    queues: RequestQueues,
    step_time: StepTimeModel,
    limits: BudgetLimits,
    *,
    now_s: float,
) -> SchedulingBudget:
    """Budget within `limits`, with fewer tokens where decodes would else miss their target."""
    num_decodes = queues.num_decodes()
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
    return SchedulingBudget(limits, free_seqs=free_seqs, num_decodes=num_decodes)


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

    All of its least share where the target, without headroom, would leave it little. Else in proportion to
    the longest wait: of prompts that are being computed, and of the first in the queue by rank. A sequence
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
