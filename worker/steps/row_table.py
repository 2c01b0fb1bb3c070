"""Rows of the running sequences: the tokens and the block table of each, kept between steps.

Owns: the row of a sequence, a fixed place below max_num_seqs for as long as the sequence is running.
Plans bring changes only; sampled tokens are appended here and are not sent again. A device that works ahead
samples them after the next step is built: until they are read, their places are kept.
Never: the scheduler's view of a sequence (scheduler/sequence.py), or sampling state (sampling/state.py).

Arrays are indexed by row, so that a step is built from them without a loop over tokens.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.cache_groups import ALL_TOKENS, Lifetime, LifetimeKind
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
    """Rows by sequence. Shapes: C rows, L longest sequence, B blocks of the longest sequence."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        lifetime: Lifetime = ALL_TOKENS,
        num_state_blocks: int = 0,
    ) -> None:
        # One more than the longest: the last token of a full sequence is sampled, but never computed.
        self._capacity_tokens = max_model_len + 1
        self._num_pool_blocks = num_blocks
        self._lifetime = lifetime
        self.block_size = block_size
        self.token_ids_CL = np.zeros((max_num_seqs, self._capacity_tokens), dtype=np.int32)
        self.num_tokens_C = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_ids_CB = np.zeros((max_num_seqs, -(-self._capacity_tokens // block_size)), dtype=np.int32)
        self.num_blocks_C = np.zeros(max_num_seqs, dtype=np.int64)
        # Positions below are behind a window: 0 stands in the block table.
        self.first_position_C = np.zeros(max_num_seqs, dtype=np.int64)
        self.state_blocks_CS = np.zeros((max_num_seqs, num_state_blocks), dtype=np.int64)
        """Blocks of states, which a row has for as long as it is taken."""
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
            lifetime=facts.groups[0].lifetime if facts.groups else ALL_TOKENS,
            num_state_blocks=facts.num_state_blocks,
        )

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
        table, *states = new.tables
        self._check_blocks(table.block_ids, num_before=table.first)
        state_blocks = [block for each in states for block in each.block_ids]
        self._check_states(state_blocks)
        row = self._free.pop()
        self.first_position_C[row] = table.first * self.block_size
        self._row_of[new.sequence_id] = row
        self._owner_C[row] = new.sequence_id
        self.generations_C[row] += 1
        self.token_ids_CL[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens_C[row] = len(new.token_ids)
        self.num_blocks_C[row] = table.first
        self._append_blocks(row, table.block_ids)
        self.state_blocks_CS[row] = state_blocks
        return row

    def grow(self, sequence_id: SequenceId, blocks: GroupBlocks) -> None:
        """Append to a block table. Raises SequenceRefused and changes nothing if that cannot be right."""
        row = self._row_of.get(sequence_id)
        if row is None:
            raise SequenceRefused("blocks for a sequence that the worker does not know")
        block_ids, *_ = blocks  # a state has all of its blocks from the beginning
        self._check_blocks(block_ids, num_before=int(self.num_blocks_C[row]))
        self._append_blocks(row, block_ids)

    def first_read(self, start: int) -> int:
        """Return the first position that a share from `start` on attends to."""
        return self._lifetime.first_read(start)

    def first_reads(self, starts_R: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `first_read` of R shares."""
        num_tokens = self._lifetime.num_tokens
        match self._lifetime.kind:
            case LifetimeKind.WINDOW:
                return np.maximum(starts_R - num_tokens + 1, 0)
            case LifetimeKind.CHUNK:
                return starts_R // num_tokens * num_tokens
        return np.zeros_like(starts_R)

    def append_tokens(self, rows: list[int], token_ids: list[int]) -> None:
        """Append one token to each row; the rows are distinct."""
        self.token_ids_CL[rows, self.num_tokens_C[rows]] = token_ids
        self.num_tokens_C[rows] += 1

    def tokens_of(self, row: int) -> NDArray[np.int32]:
        """Return the tokens of a row so far, without a copy."""
        return self.token_ids_CL[row, : self.num_tokens_C[row]]

    def known_tokens_of(self, row: int) -> NDArray[np.int32]:
        """Return the tokens of a row without those that the device still samples."""
        tokens = self.tokens_of(row)
        while len(tokens) and tokens[-1] == UNKNOWN_TOKEN:
            tokens = tokens[:-1]
        return tokens

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

    def _append_blocks(self, row: int, block_ids: Sequence[BlockId]) -> None:
        start = self.num_blocks_C[row]
        self.block_ids_CB[row, start : start + len(block_ids)] = block_ids
        self.num_blocks_C[row] += len(block_ids)

    def _check_blocks(self, block_ids: Sequence[BlockId], *, num_before: int) -> None:
        if num_before + len(block_ids) > self.block_ids_CB.shape[1]:
            raise SequenceRefused(f"more than {self.block_ids_CB.shape[1]} blocks for one sequence")
        self._check_in_pool(block_ids)

    def _check_states(self, block_ids: Sequence[BlockId]) -> None:
        if len(block_ids) != self.state_blocks_CS.shape[1]:
            raise SequenceRefused(f"{len(block_ids)} blocks for a state of {self.state_blocks_CS.shape[1]}")
        self._check_in_pool(block_ids)

    def _check_in_pool(self, block_ids: Sequence[BlockId]) -> None:
        if block_ids and not (min(block_ids) >= 1 and max(block_ids) <= self._num_pool_blocks):
            raise SequenceRefused(f"a block outside of 1 to {self._num_pool_blocks}")
