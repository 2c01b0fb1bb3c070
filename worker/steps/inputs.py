"""Arrays of one step on the host, built from a plan and the rows, here alone.

Owns: the flattened batch (one token after another, sequences side by side, decodes first), and the
checks that keep a wrong plan from writing outside of its blocks or reading outside of the vocabulary.

Shapes: R sequences, T tokens, N logits wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.messages import NewSequence, ScheduledSequence, SchedulerOutput, SequenceId
from worker.attention.interface import AttentionMetadata, BlockTables
from worker.states.interface import Tap
from worker.steps.row_table import RowTable
from worker.steps.tokens import PlacedRows
from worker.worker_errors import SequenceRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of one forward pass, and the sequences that its logits belong to."""

    input_ids_T: NDArray[np.int64]
    """Tokens to compute; UNKNOWN_TOKEN stands for the token that the step before samples for the same row."""
    position_ids_T: NDArray[np.int64]
    """[T], or [3, T] where a picture's time, row and column differ."""
    rows_T: NDArray[np.int64]
    """The row of each token."""
    logits_indices_N: NDArray[np.int64]
    """Tokens whose logits are wanted: the last one of each share that samples; of one with k drafts the last
    1 + k."""
    metadata: AttentionMetadata
    sequence_ids: list[SequenceId]
    """Sequences that sample. Without drafts there are N, aligned with logits_indices_N."""
    rows: list[int]
    """Rows that sample, aligned with sequence_ids."""
    shares: list[ScheduledSequence]
    """Shares in the order of the batch: the first num_tokens of T belong to the first share, and so on."""
    keeps_hidden: bool = False
    """Whether the hidden states of all tokens are asked for."""
    placed: PlacedRows | None = None
    """Rows of pictures; None: there are none among the tokens."""

    @property
    def has_drafts(self) -> bool:
        """Whether some row has several logits."""
        return len(self.logits_indices_N) > len(self.rows)


def check_new_sequence(new: NewSequence, vocab_size: int) -> None:
    """Raise SequenceRefused for tokens that the model has no embedding for."""
    lowest, highest = min(new.token_ids, default=-1), max(new.token_ids, default=-1)
    if lowest < 0 or highest >= vocab_size:
        wrong = "no tokens" if not new.token_ids else f"token {highest if lowest >= 0 else lowest}"
        raise SequenceRefused(f"{wrong}: the model knows tokens 0 to {vocab_size - 1}")


class _Shares(NamedTuple):
    """Shares of a step as arrays, one number for each of R."""

    rows_R: NDArray[np.int64]
    """Row of each share; -1 if the worker does not know the sequence."""
    starts_R: NDArray[np.int64]
    counts_R: NDArray[np.int64]
    samples_R: NDArray[np.bool_]

    @classmethod
    def of(cls, shares: Sequence[ScheduledSequence], rows: RowTable) -> "_Shares":
        numbers = np.fromiter(
            chain.from_iterable(shares), np.int64, len(shares) * len(ScheduledSequence._fields)
        )
        _, starts_R, counts_R, samples_R = numbers.reshape(len(shares), -1).T
        rows_R = rows.rows_of(share.sequence_id for share in shares)
        return cls(rows_R, starts_R, counts_R, samples_R.astype(np.bool_))

    def are_sound(self, rows: RowTable) -> bool:
        """Whether `is_sound` holds for each share."""
        rows_R, starts_R, counts_R, samples_R = self
        if rows_R.min() < 0:
            return False
        ends_R = starts_R + counts_R
        has_slots_R = ends_R <= np.minimum(rows.num_tokens_C[rows_R], rows.num_slots(rows_R))
        has_slots_R &= rows.have_what_is_read(rows_R, starts_R)
        has_room_R = ends_R + samples_R <= rows.token_ids_CL.shape[1]
        return bool((has_slots_R & has_room_R & (starts_R >= 0) & (counts_R >= 1)).all())


def build_inputs(plan: SchedulerOutput, rows: RowTable, failures: dict[SequenceId, str]) -> StepInputs | None:
    """Build the step; None if no share is left. Rows hold the plan's drafts already.

    A share that does not fit its row is left out and explained in `failures`; the others are computed.
    """
    shares: Sequence[ScheduledSequence] = plan.scheduled
    if not shares:
        return None
    arrays = _Shares.of(shares, rows)
    if not arrays.are_sound(rows):
        shares = [share for share in shares if is_sound(share, rows, failures)]
        if not shares:
            return None
        arrays = _Shares.of(shares, rows)
    is_long_R = arrays.counts_R > 1
    if (is_long_R[:-1] & ~is_long_R[1:]).any():
        shares = sorted(shares, key=lambda share: share.num_tokens > 1)
        arrays = _Shares.of(shares, rows)
    row_of_R, starts_R, counts_R, samples_R = arrays
    num_decodes = len(shares) - int(np.count_nonzero(is_long_R))

    ends_R = np.cumsum(counts_R)
    rows_T, positions_T = row_of_R, starts_R
    if num_decodes < len(shares):
        rows_T = np.repeat(row_of_R, counts_R)
        positions_T = np.arange(ends_R[-1]) + np.repeat(starts_R + counts_R - ends_R, counts_R)
    wanted_N = np.flatnonzero(samples_R)
    seq_lens_R = starts_R + counts_R
    metadata = AttentionMetadata(
        num_decodes=num_decodes,
        query_starts=np.concatenate([[0], ends_R]),
        seq_lens=seq_lens_R,
        tables=_block_tables(rows, row_of_R, seq_lens_R),
        token_blocks_ST=rows.blocks_at(rows_T, positions_T),
        token_offsets=positions_T % rows.block_size,
        state_blocks=rows.state_blocks_CS[row_of_R],
        taps=_taps(plan, shares) if plan.taps else (),
        num_drafts_R=_num_drafts(plan, shares) if plan.draft_token_ids else (),
    )
    return StepInputs(
        input_ids_T=rows.token_ids_CL[rows_T, positions_T].astype(np.int64),
        position_ids_T=positions_T,
        rows_T=rows_T,
        logits_indices_N=_wanted_logits(plan, shares, ends_R, wanted_N),
        metadata=metadata,
        sequence_ids=[share.sequence_id for share in shares if share.samples],
        rows=row_of_R[wanted_N].tolist(),
        shares=list(shares),
    )


def _taps(plan: SchedulerOutput, shares: Sequence[ScheduledSequence]) -> tuple[Tap, ...]:
    """Find the share of each tap; those of sequences that are not computed are left out."""
    places = {share.sequence_id: place for place, share in enumerate(shares)}
    found = [(tap, places[tap.sequence_id]) for tap in plan.taps if tap.sequence_id in places]
    return tuple(Tap(place, tap.position - shares[place].start, tap.block_ids) for tap, place in found)


def _num_drafts(plan: SchedulerOutput, shares: Sequence[ScheduledSequence]) -> tuple[int, ...]:
    return tuple([len(plan.draft_token_ids.get(share.sequence_id, ())) for share in shares])


def is_sound(share: ScheduledSequence, rows: RowTable, failures: dict[SequenceId, str]) -> bool:
    """Check that the share's tokens are known and have slots. Slots are written unchecked afterwards."""
    row = rows.row_of(share.sequence_id)
    end = share.start + share.num_tokens
    if row is None:
        reason = "scheduled, but the worker does not know it"
    elif share.start < 0 or share.num_tokens < 1:
        reason = f"scheduled for {share.num_tokens} tokens from position {share.start}"
    elif end > rows.num_tokens_C[row]:
        reason = f"scheduled up to position {end}, but has {rows.num_tokens_C[row]} tokens"
    elif end > (num_slots := int(rows.num_slots(np.array([row]))[0])):
        reason = f"scheduled up to position {end}, but its blocks end at {num_slots}"
    elif (first := rows.first_missing(row, share.start)) is not None:
        reason = f"scheduled from position {share.start}, but its blocks begin at {first}"
    elif share.samples and end >= rows.token_ids_CL.shape[1]:
        reason = f"sampled at position {end}, beyond max_model_len"
    else:
        return True
    failures.setdefault(share.sequence_id, reason)
    return False


def _wanted_logits(
    plan: SchedulerOutput,
    shares: Sequence[ScheduledSequence],
    ends_R: NDArray[np.int64],
    wanted_N: NDArray[np.int64],
) -> NDArray[np.int64]:
    """List the last token of each of the shares that sample, and before it as many as it has drafts."""
    if not plan.draft_token_ids:
        return ends_R[wanted_N] - 1
    wanted = [
        np.arange(end - 1 - num_drafts, end)
        for num_drafts, end in zip(
            np.array(_num_drafts(plan, shares))[wanted_N], ends_R[wanted_N].tolist(), strict=True
        )
    ]
    return np.concatenate(wanted) if wanted else np.empty(0, np.int64)


def _block_tables(rows: RowTable, row_of_R: NDArray[np.int64], seq_lens_R: NDArray[np.int64]) -> BlockTables:
    longest = -(-int(seq_lens_R.max()) // rows.block_size)
    num_blocks_SR = rows.num_blocks_SC[:, row_of_R]
    return BlockTables(rows.block_ids_SCB, row_of_R, num_blocks_SR, rows.generations_C[row_of_R], longest)
