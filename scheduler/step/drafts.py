"""Guesses at the next tokens of running sequences, until a plan verifies them.

Owns: which sequence has which drafts, and who expects some.
Never: makes a guess, or judges one: the worker does both.
Source: speculative decoding, arXiv:2211.17192. A share of 1 + k tokens computes the last known token and k
drafts; the worker returns the drafts that the model would have drawn too, and one token more.

Drafts continue the last token that is known. So they fit only while no plan in flight draws further tokens of
their sequence. Whoever is offered drafts too early is not planned ahead any more, and the next ones fit.
"""

from scheduler.messages import SequenceId
from scheduler.sequence import Sequence, Status

_EXPECTED: tuple[int, ...] = ()


class Drafts:
    """Empty, and looked at by nobody, where nothing is guessed."""

    def __init__(self) -> None:
        self.by_sequence: dict[SequenceId, tuple[int, ...]] = {}
        """Without any tokens: some are expected."""

    def propose(self, seq: Sequence, token_ids: tuple[int, ...]) -> None:
        """For the next share of `seq`, if that computes the last known token and nothing else."""
        if seq.status is not Status.RUNNING or not token_ids:
            return
        fits = seq.num_uncomputed_tokens == 1 and seq.num_tokens == len(seq.token_ids)
        self.by_sequence[seq.sequence_id] = token_ids if fits else _EXPECTED

    def take(self, seq: Sequence) -> tuple[int, ...] | None:
        """None: plan it as if there were no drafts in this world."""
        return self.by_sequence.pop(seq.sequence_id, None)

    def forget(self, seq: Sequence) -> None:
        """It left the running line."""
        self.by_sequence.pop(seq.sequence_id, None)
