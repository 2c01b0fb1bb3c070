"""What is left of one step.

Owns: how much a step may have, and what is left of it while it is planned.
"""

from math import inf

from scheduler.config import SchedulerConfig
from scheduler.sequence import Sequence
from scheduler.step_time import StepTimeModel

# What a target for the time between tokens leaves to prefill at least: it goes on, if slowly.
_MIN_CHUNK_TOKENS = 16


class SchedulingBudget:
    """Tokens to compute, slots to fill and grammars to compile in the step being planned.

    A step is planned in one pass from the front of the line, and nothing planned is undone; so the
    budget only falls.
    """

    __slots__ = ("num_decodes_ahead", "remaining_grammars", "remaining_seqs", "remaining_tokens")

    def __init__(self, *, max_tokens: int, free_seqs: int, max_grammars: int, num_decodes: int) -> None:
        self.remaining_tokens = max_tokens
        self.remaining_seqs = free_seqs
        """Slots for sequences that are not running yet."""
        self.remaining_grammars = max_grammars
        """Of these, so many may have a grammar, which the worker compiles."""
        self.num_decodes_ahead = num_decodes
        """Running sequences not yet planned that need one token each; it is set aside for them."""

    def take_decode(self) -> None:
        self.remaining_tokens -= 1
        self.num_decodes_ahead -= 1

    def take_chunk(self, num_wanted: int) -> int:
        """The share of a prefill: what it wants, cut to what the decodes leave; 0 if that is nothing.

        Tokens that already flow must not stall behind a long prompt (Sarathi-Serve, arXiv:2403.02310).
        """
        share = min(num_wanted, self.remaining_tokens - self.num_decodes_ahead)
        if share <= 0:
            return 0
        self.remaining_tokens -= share
        return share

    def take_slot(self) -> None:
        self.remaining_seqs -= 1

    def take_grammar(self) -> None:
        self.remaining_grammars -= 1

    def give_back_slot(self) -> None:
        """Somebody ended while the step was planned."""
        self.remaining_seqs += 1

    def give_up_decode(self) -> None:
        """Somebody left the line before it came to the token set aside for it."""
        self.num_decodes_ahead -= 1


def budget_for_step(
    config: SchedulerConfig, running: list[Sequence], step_time: StepTimeModel, max_tokens: int
) -> SchedulingBudget:
    """At most `max_tokens`; fewer where decodes would else miss their target."""
    # A list, and no call for each sequence: this is a tenth of a step of decodes.
    num_decodes = sum([seq.num_tokens - seq.num_computed_tokens == 1 for seq in running])
    if num_decodes and config.target_itl_s != inf:
        within = step_time.tokens_within(config.target_itl_s)
        if within is not None:
            max_tokens = min(max_tokens, max(within, num_decodes + _MIN_CHUNK_TOKENS))
    return SchedulingBudget(
        max_tokens=max_tokens,
        free_seqs=config.max_num_seqs - len(running),
        max_grammars=config.max_new_grammars,
        num_decodes=num_decodes,
    )
