"""Budget of one step: tokens, slots and tokens to look up."""

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.sequence import Sequence

# One in this many tokens of a step's prefill is for the prompt that has waited longest: more urgent ones that
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


@dataclass(slots=True, eq=False)
class SchedulingBudget:
    """Tokens to compute and slots to fill in the step being planned.

    A step is planned in one pass from the front of the queue, and nothing planned is undone; so the
    budget only falls.
    """

    remaining_tokens: int
    remaining_prefill_tokens: int
    """Most of these for prompts."""
    remaining_seqs: int
    """Slots for sequences that are not running yet."""
    num_decodes_ahead: int
    """Running sequences not yet planned that need one token each; it is set aside for them."""
    num_set_aside: int = 0
    """Tokens for which there is memory, and that are left out to keep the pace of decodes."""
    has_chunks: bool = False
    remaining_hashed_tokens: int = field(default_factory=lambda: _MOST_HASHED_TOKENS)
    """Tokens whose keys may still be computed, to look them up; below 0 if the first took more."""
    num_prefills_ahead: int = 1
    """Prompts that may still want a part of this step; counted where one may not take all of it."""
    reserved_tokens: int = 0
    reserved_for: Sequence | None = None
    """Prefill that gets these tokens, whatever stands before it."""

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
        self._note_chunk(seq, share)
        return share

    def take_whole(self, seq: Sequence, share: int) -> int:
        """Take a share that cannot be cut, whatever that does to the pace; 0 if there is no memory for it."""
        left = self.remaining_tokens + self.num_set_aside - share
        if left < self.num_decodes_ahead:
            return 0
        self.remaining_tokens = max(self.remaining_tokens - share, self.num_decodes_ahead)
        self.num_set_aside = left - self.remaining_tokens
        self._note_chunk(seq, share)
        return share

    def _note_chunk(self, seq: Sequence, share: int) -> None:
        self.remaining_prefill_tokens -= share
        self.has_chunks = True
        self.num_prefills_ahead -= 1
        if seq is self.reserved_for:
            self.reserved_for, self.reserved_tokens = None, 0

    def equal_part(self) -> int:
        """Part of each prompt, if the rest is shared with those that may still come."""
        room = min(self.remaining_tokens - self.num_decodes_ahead, self.remaining_prefill_tokens)
        return room // max(self.num_prefills_ahead, 1)

    def reserve(self, seq: Sequence) -> None:
        """Set a part of what prefill may have aside for `seq`."""
        room = min(self.remaining_tokens - self.num_decodes_ahead, self.remaining_prefill_tokens)
        self.reserved_for, self.reserved_tokens = seq, min(room // _RESERVED_PART, seq.num_uncomputed_tokens)

    def chunk_tokens(self, seq: Sequence, *, num_decodes: int) -> int:
        """Longest chunk that the step has room for next to `num_decodes`; 0 or less is none.

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
        """Whether keys of `num_tokens` more may be computed. The first sequence may always have its own."""
        return (
            num_tokens <= self.remaining_hashed_tokens or self.remaining_hashed_tokens == _MOST_HASHED_TOKENS
        )

    def give_back_slot(self) -> None:
        """Note that a running sequence ended or was preempted while the step was planned."""
        self.remaining_seqs += 1

    def give_up_decode(self) -> None:
        """Note that a sequence left the queue before it came to the token set aside for it."""
        self.num_decodes_ahead -= 1
