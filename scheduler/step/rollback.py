"""Rollback of plans that the worker could not carry out, as if they had never been made.

Owns: what a plan in flight has changed, and how each of these changes is undone: sequences that computed in
it wait again, blocks that it published are forgotten, rows that it released are released once more.

KV that earlier plans have computed stays where it is, and is found again where there is a prefix cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from sys import maxsize

from scheduler.messages import SchedulerOutput, SequenceId
from scheduler.sequence import Sequence, Status
from scheduler.step.scheduler_state import SchedulerState
from scheduler.step.token_shares import TokenShares


@dataclass(frozen=True, slots=True)
class Rollback:
    """`plans` are all that were in flight: a later one is built on what the first was to compute.

    `sequences` are the unfinished ones.
    """

    _state: SchedulerState
    _shares: TokenShares
    _plans: list[SchedulerOutput]
    _sequences: Mapping[SequenceId, Sequence]

    def undo(self) -> list[SequenceId]:
        """Undo the plans.

        Returns the rows that the worker must free, whether or not it has done so already.
        """
        for plan in self._plans:
            self._forget_copies(plan)
        requeued = [
            sequence_id
            for sequence_id, start in self._first_positions().items()
            if sequence_id in self._sequences and self._requeue(self._sequences[sequence_id], start)
        ]
        for preemption in (preemption for plan in self._plans for preemption in plan.preemptions):
            seq = self._sequences.get(preemption.sequence_id)
            if seq is not None and seq.status is Status.SWAPPED:
                self._state.kv.drop_copy(seq)
                self._state.queues.lose_copy(seq)
        return [sequence_id for plan in self._plans for sequence_id in plan.released] + requeued

    def ended_and_published(self) -> set[SequenceId]:
        """Sequences that ended meanwhile, after a share of which something may be found.

        Which block it was is unknown now.
        """
        block_size = self._state.kv.block_size
        return {
            share.sequence_id
            for plan in self._plans
            for share in plan.scheduled
            if share.sequence_id not in self._sequences
            and (
                self._state.kv.has_state  # what it computed last may be found at its end
                or share.start // block_size < (share.start + share.num_tokens) // block_size
            )
        }

    def _first_positions(self) -> dict[SequenceId, int]:
        """Start of the first share of each sequence in the plans."""
        starts: dict[SequenceId, int] = {}
        for plan in self._plans:
            for share in plan.scheduled:
                sequence_id = share.sequence_id
                starts[sequence_id] = min(share.start, starts.get(sequence_id, maxsize))
            # One may have been admitted, or have got blocks, but for want of tokens no share.
            for sequence_id in (*plan.new_blocks, *(new.sequence_id for new in plan.new_sequences)):
                starts.setdefault(sequence_id, maxsize)
        return starts

    def _requeue(self, seq: Sequence, start: int) -> bool:
        """Move it to the waiting queue, with the tokens that are known; False if it is there already."""
        self._state.kv.index.forget(seq, start=start)
        seq.num_tokens = len(seq.token_ids)  # tokens that were being sampled never come
        if seq.status is not Status.RUNNING:
            return False
        seq.num_reached_tokens = max(seq.num_reached_tokens, min(start, seq.num_computed_tokens))
        self._state.kv.free(seq)
        self._shares.forget_extras(seq)
        self._state.queues.requeue(seq, Status.WAITING)
        seq.num_preemptions += 1
        return True

    def _forget_copies(self, plan: SchedulerOutput) -> None:
        """Let no copy be found: it is unknown whether any of them was made."""
        self._state.kv.forget_copies(plan.swap_out)
        for copy in (*plan.swap_in, *plan.copies):
            self._state.kv.index.reuse_all((copy.target,))
