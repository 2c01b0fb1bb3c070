"""Rows of the running sequences: the tokens and the block table of each, kept between steps.

Owns: the row of a sequence, a fixed place below max_num_seqs for as long as the sequence is running.
Plans bring changes only; sampled tokens are appended here and are not sent again. A device that works ahead
samples them after the next step is built: until they are read, their places are kept.

Arrays are indexed by row, so that a step is built from them without a loop over tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.cache_groups import CacheGroup, LifetimeKind
from scheduler.messages import BlockId, GroupBlocks, NewSequence, SequenceId
from worker.worker_config import ModelFacts
from worker.worker_errors import SequenceRefused

UNKNOWN_TOKEN = -1
"""Stands for a token that the device samples, or has sampled, and that the host has not read yet."""


class ExpectedTokens(NamedTuple):
    """Places kept for the tokens that a step samples. Aligned, one entry for each of N rows."""

    rows_N: NDArray[np.int64]
    positions_N: NDArray[np.int64]
    owners_N: NDArray[np.int64]
    """Sequence ids: a row may belong to another when the tokens are read."""


class RowTable:
    """Rows by sequence, with a table of blocks for each stripe of each group of layers.

    A state has no blocks by token: its group has one table for all of its stripes, in `state_blocks_CS`.

    Shapes: C rows, L longest sequence, B blocks of the longest sequence, S stripes, G groups of tokens.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        groups: tuple[CacheGroup, ...] = (CacheGroup(),),
    ) -> None:
        # One more than the longest: the last token of a full sequence is sampled, but never computed.
        self._capacity_tokens = max_model_len + 1
        self._num_pool_blocks = num_blocks
        self._groups = groups
        self.block_size = block_size
        self.token_ids_CL = np.zeros((max_num_seqs, self._capacity_tokens), dtype=np.int32)
        self.num_tokens_C = np.zeros(max_num_seqs, dtype=np.int64)
        self._stripes = _stripes_of(groups)
        num_stripes = max(stripes.stop for stripes in self._stripes.values()) if self._stripes else 0
        num_places = -(-self._capacity_tokens // block_size)
        self.block_ids_SCB = np.zeros((num_stripes, max_num_seqs, num_places), dtype=np.int32)
        self.num_blocks_SC = np.zeros((num_stripes, max_num_seqs), dtype=np.int64)
        """Places that a row has, those included that were passed before it was given."""
        # Positions below are behind the window of a group: 0 stands in its tables.
        self._first_positions = {index: np.zeros(max_num_seqs, dtype=np.int64) for index in self._stripes}
        num_state_blocks = sum(
            group.num_stripes for group in groups if group.lifetime.kind is LifetimeKind.FIXED
        )
        self.state_blocks_CS = np.zeros((max_num_seqs, num_state_blocks), dtype=np.int64)
        """Blocks of states, which a row has for as long as it is taken."""
        keeps_most = max(
            self._stripes, key=lambda index: groups[index].lifetime.num_tokens or inf, default=-1
        )
        self.leading_stripe = self._stripes[keeps_most].start if self._stripes else -1
        """First stripe of the group that keeps most; -1 where no group keeps tokens."""
        self._row_of: dict[SequenceId, int] = {}
        self.generations_C = np.zeros(max_num_seqs, dtype=np.int64)
        """One more for each sequence that has had the row: its table began anew."""
        self._owner_C = np.zeros(max_num_seqs, dtype=np.int64)  # the last owner, once a row is free
        # Taken from the end: the lowest rows first, so that few pages of the arrays are ever touched.
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @classmethod
    def of(cls, facts: ModelFacts, max_num_seqs: int) -> "RowTable":
        """Make the table of a model that was loaded."""
        return cls(
            max_num_seqs=max_num_seqs,
            max_model_len=facts.max_model_len,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            groups=facts.groups or (CacheGroup(),),
        )

    def keeping_all(self) -> "RowTable":
        """Show the same rows to a model whose layers keep all tokens, whatever windows have passed."""
        view = copy(self)
        view._first_positions = {}
        return view

    def __len__(self) -> int:
        return len(self._row_of)

    def row_of(self, sequence_id: SequenceId) -> int | None:
        """Look up a row; None for a sequence that was never sent, or was released or refused."""
        return self._row_of.get(sequence_id)

    def rows_of(self, sequence_ids: Iterable[SequenceId]) -> NDArray[np.int64]:
        """Look up many rows; -1 for a sequence that has none."""
        row_of = self._row_of
        return np.array([row_of.get(each, -1) for each in sequence_ids], dtype=np.int64)

    def add(self, new: NewSequence) -> int:
        """Give a sequence a row. Raises SequenceRefused and changes nothing if it cannot have one."""
        if not self._free:
            raise SequenceRefused(f"all {len(self.num_tokens_C)} rows of the worker are taken")
        if len(new.token_ids) >= self._capacity_tokens:
            raise SequenceRefused(
                f"{len(new.token_ids)} tokens, but max_model_len is {self._capacity_tokens - 1}"
            )
        blocks = [table.block_ids for table in new.tables]
        self._check_blocks(blocks, [table.first for table in new.tables])
        row = self._free.pop()
        self._row_of[new.sequence_id] = row
        self._owner_C[row] = new.sequence_id
        self.generations_C[row] += 1
        self.token_ids_CL[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens_C[row] = len(new.token_ids)
        for index, table in enumerate(new.tables):
            if index in self._stripes:
                self._first_positions[index][row] = table.first * self.block_size
                self.num_blocks_SC[self._stripes[index], row] = table.first
        self._append_blocks(row, blocks)
        return row

    def grow(self, sequence_id: SequenceId, blocks: GroupBlocks) -> None:
        """Append to a block table. Raises SequenceRefused and changes nothing if that cannot be right."""
        row = self._row_of.get(sequence_id)
        if row is None:
            raise SequenceRefused("blocks for a sequence that the worker does not know")
        self._check_blocks(blocks, self._ends(row))
        self._append_blocks(row, blocks)

    def num_slots(self, rows_R: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the positions of each row that have a place in all groups."""
        num_blocks_SR, most = self.num_blocks_SC[:, rows_R], self.block_ids_SCB.shape[2]
        num_slots_R: NDArray[np.int64] = num_blocks_SR.min(axis=0, initial=most) * self.block_size
        return num_slots_R

    def blocks_at(self, rows_T: NDArray[np.int64], positions_T: NDArray[np.int64]) -> NDArray[np.int64]:
        """Look up the blocks [S, T] of T tokens, of each stripe."""
        blocks_ST: NDArray[np.int32] = self.block_ids_SCB[:, rows_T, positions_T // self.block_size]
        return blocks_ST.astype(np.int64, order="C")

    def first_missing(self, row: int, start: int) -> int | None:
        """Return the first position that the row still has, if a share from `start` on reads earlier ones."""
        for index, first_positions in self._first_positions.items():
            if self._groups[index].lifetime.first_read(start) < first_positions[row]:
                return int(first_positions[row])
        return None

    def have_what_is_read(self, rows_R: NDArray[np.int64], starts_R: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell for each share whether `first_missing` is None."""
        have_R = np.ones(len(rows_R), dtype=np.bool_)
        for index, first_positions in self._first_positions.items():
            firsts_R = first_positions[rows_R]
            if firsts_R.any():
                have_R &= self._groups[index].lifetime.first_read(starts_R) >= firsts_R
        return have_R

    def tokens_of(self, row: int) -> NDArray[np.int32]:
        """Return the tokens of a row so far, without a copy."""
        return self.token_ids_CL[row, : self.num_tokens_C[row]]

    def known_tokens_of(self, row: int) -> NDArray[np.int32]:
        """Return the tokens of a row without those that the device still samples."""
        tokens = self.tokens_of(row)
        while len(tokens) and tokens[-1] == UNKNOWN_TOKEN:
            tokens = tokens[:-1]
        return tokens

    def hold_all_drafts(
        self,
        drafts: Mapping[SequenceId, tuple[int, ...]],
        vocab_size: int,
        failures: dict[SequenceId, str],
    ) -> dict[int, tuple[int, ...]]:
        """Append the drafts of a step; returns those of each row. What cannot be right is a failure."""
        held = {}
        for sequence_id, draft_ids in drafts.items():
            try:
                held[self.hold_drafts(sequence_id, draft_ids, vocab_size)] = draft_ids
            except SequenceRefused as error:
                failures.setdefault(sequence_id, str(error))
        return held

    def hold_drafts(self, sequence_id: SequenceId, draft_ids: Sequence[int], vocab_size: int) -> int:
        """Append drafts to a row, for one step, and return the row. Raises SequenceRefused.

        `num_tokens_C` counts them until `drop_drafts`.
        """
        row = self._row_of.get(sequence_id)
        if row is None:
            raise SequenceRefused("drafts for a sequence that the worker does not know")
        unknown = next((draft for draft in draft_ids if not 0 <= draft < vocab_size), None)
        if unknown is not None:
            raise SequenceRefused(f"draft {unknown}: the model knows tokens 0 to {vocab_size - 1}")
        start = int(self.num_tokens_C[row])
        if start + len(draft_ids) >= self._capacity_tokens:
            raise SequenceRefused(f"{len(draft_ids)} drafts after {start} tokens, beyond max_model_len")
        self.token_ids_CL[row, start : start + len(draft_ids)] = draft_ids
        self.num_tokens_C[row] += len(draft_ids)
        return row

    def drop_drafts(self, row: int, num_drafts: int) -> None:
        """Cut the drafts of a step off again, the right ones too: `extend` appends the sampled tokens."""
        self.num_tokens_C[row] -= num_drafts

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Append sampled tokens to a row."""
        start = int(self.num_tokens_C[row])
        self.token_ids_CL[row, start : start + len(token_ids)] = token_ids
        self.num_tokens_C[row] += len(token_ids)

    def expect_tokens(self, rows: list[int]) -> ExpectedTokens:
        """Append an unknown token to each row, which is longer from now on; the rows are distinct."""
        rows_N = np.array(rows, dtype=np.int64)
        positions_N = self.num_tokens_C[rows_N]
        self.token_ids_CL[rows_N, positions_N] = UNKNOWN_TOKEN
        self.num_tokens_C[rows_N] += 1
        return ExpectedTokens(rows_N, positions_N, self._owner_C[rows_N])

    def learn_tokens(self, expected: ExpectedTokens, token_ids: Sequence[int]) -> None:
        """Put tokens in their places, if the sequence still has its row, or has it again.

        A sequence that was admitted again keeps the tokens that it brought.
        """
        rows_N, positions_N, owners_N = expected
        is_open_N = self._owner_C[rows_N] == owners_N
        is_open_N &= self.token_ids_CL[rows_N, positions_N] == UNKNOWN_TOKEN
        self.token_ids_CL[rows_N[is_open_N], positions_N[is_open_N]] = np.array(token_ids)[is_open_N]

    def release(self, sequence_id: SequenceId) -> int | None:
        """Free a row and return it; None if there is none, as after a step that failed half-way."""
        row = self._row_of.pop(sequence_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def _append_blocks(self, row: int, blocks: Sequence[tuple[BlockId, ...]]) -> None:
        for index, block_ids in enumerate(blocks):
            if not block_ids:
                continue
            stripes = self._stripes.get(index)
            if stripes is None:
                self.state_blocks_CS[row] = block_ids
                continue
            start, num_stripes = self.num_blocks_SC[stripes.start, row], stripes.stop - stripes.start
            end = start + len(block_ids) // num_stripes
            by_place = np.array(block_ids, dtype=np.int32).reshape(-1, num_stripes)
            self.block_ids_SCB[stripes, row, start:end] = by_place.T
            self.num_blocks_SC[stripes, row] = end

    def _check_blocks(self, blocks: Sequence[tuple[BlockId, ...]], firsts: Sequence[int]) -> None:
        """Raise SequenceRefused for blocks that cannot stand at these places of the groups' tables."""
        if len(blocks) != len(self._groups):
            raise SequenceRefused(f"blocks for {len(blocks)} groups of layers, of {len(self._groups)}")
        for index, (block_ids, first) in enumerate(zip(blocks, firsts, strict=True)):
            num_stripes = self._groups[index].num_stripes
            num_places, rest = divmod(len(block_ids), num_stripes)
            most = self.block_ids_SCB.shape[2] if index in self._stripes else 1
            if rest:
                raise SequenceRefused(f"{len(block_ids)} blocks for places of {num_stripes}")
            if first + num_places > most:
                raise SequenceRefused(f"more than {most * num_stripes} blocks for one sequence")
            if block_ids and not (min(block_ids) >= 1 and max(block_ids) <= self._num_pool_blocks):
                raise SequenceRefused(f"a block outside of 1 to {self._num_pool_blocks}")

    def _ends(self, row: int) -> list[int]:
        """Places that each group has of a row; a state has one."""
        return [
            int(self.num_blocks_SC[self._stripes[index].start, row]) if index in self._stripes else 1
            for index in range(len(self._groups))
        ]


def _stripes_of(groups: tuple[CacheGroup, ...]) -> dict[int, slice]:
    """Stripes of each group that keeps something of each token."""
    stripes, end = {}, 0
    for index, group in enumerate(groups):
        if group.lifetime.kind is not LifetimeKind.FIXED:
            stripes[index] = slice(end, end + group.num_stripes)
            end += group.num_stripes
    return stripes
