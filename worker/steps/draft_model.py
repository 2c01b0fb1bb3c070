"""Drafts by a smaller model, whose keys and values lie in the blocks of the sequences themselves.

Owns: the passes of the draft model, and which of its keys and values are there. A block of the pool holds
those of both models, so that a preemption, a swap or a cached prefix moves or keeps both:

    tokens of a row     p p p p p p p p t t t t  ?
    model               written by steps ....... |
    draft model         written here . |  behind: caught up when drafts are asked for

Prompts too are caught up when drafts are first wanted, in parts as large as a pass may be.
Source: speculative decoding, arXiv:2211.17192; here a draft is sampled with the uniform of its position, and
not judged by probabilities.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from scheduler.messages import BlockCopy, ScheduledSequence, SchedulerOutput, SequenceId
from worker.sampling.row_sampler import RowSampler
from worker.sampling.state import SamplingRow
from worker.steps.inputs import StepInputs, build_inputs
from worker.steps.model_runner import StepRunner
from worker.steps.row_table import RowTable
from worker.steps.tokens import HiddenStates


class DraftSizes(NamedTuple):
    """Limits of a draft model."""

    vocab_size: int
    """Tokens that it reads and samples; ids behind are read as token 0."""
    sampled_vocab_size: int
    """Tokens that the model samples; the draft model may know fewer, and guesses only those."""
    max_len: int
    """Its context window: sequences beyond it get no drafts."""
    max_tokens: int
    """Most tokens of a pass."""
    num_blocks: int
    num_host_blocks: int
    has_state: bool
    """Whether it has recurrent layers. Then the first block of a sequence's state stands for that of both."""
    num_ahead: int = 0
    """Tokens between a place and the one that is read there: 1 for a head of the model (head_steps.py), which
    also reads the hidden state at the place."""


class DraftsMade(NamedTuple):
    """Drafts of some sequences, and what they took."""

    drafts: Mapping[SequenceId, tuple[int, ...]]
    passes: tuple[tuple[int, float], ...]
    """Tokens and seconds of each."""
    num_followed: Mapping[SequenceId, int]
    """Tokens of each sequence that the draft model has computed, with a draft or without."""


NOTHING_MADE = DraftsMade({}, (), {})


_MOST_FOLLOWED = 32
"""Steps that are taken in together, and tokens of one that waits for that."""


class _Ahead(NamedTuple):
    """Drafts of a row whose keys and values were written, up to the one before the last."""

    num_tokens: int
    """Tokens of the row when they were made."""
    drafts: tuple[int, ...]


class _Filled:
    """Number of leading positions of each block whose keys and values the draft model has written.

    Of a block with the beginning of a state: the tokens that the draft model's own has taken in.
    """

    def __init__(self, sizes: DraftSizes, block_size: int) -> None:
        self._device = np.zeros(sizes.num_blocks + 1, np.int64)
        self._host = np.zeros(sizes.num_host_blocks + 1, np.int64)
        self._device[0] = block_size  # stands for blocks that a window has passed
        self._block_size = block_size

    def move(self, plan: SchedulerOutput) -> None:
        """Follow the copies of a plan."""
        for source, target, copies in (
            (self._device, self._host, plan.swap_out),
            (self._host, self._device, plan.swap_in),
            (self._device, self._device, plan.copies),
        ):
            if copies:
                sources, targets = _ends(copies)
                target[targets] = source[sources]

    def lower(self, blocks_T: NDArray[np.int64], offsets_T: NDArray[np.int64]) -> None:
        """Note that other tokens may be at these places now."""
        np.minimum.at(self._device, blocks_T, offsets_T)

    def raise_to(self, blocks_T: NDArray[np.signedinteger], offsets_T: NDArray[np.int64]) -> None:
        """Note places that were written, all before them being there."""
        np.maximum.at(self._device, blocks_T, offsets_T + 1)

    def put(self, state_blocks_R: NDArray[np.int64], num_tokens_R: NDArray[np.int64] | int) -> None:
        """Note the tokens that states have taken in."""
        self._device[state_blocks_R] = num_tokens_R

    def taken(self, state_block: int) -> int:
        """Count the tokens that a state has taken in; 0 if it is another sequence's."""
        return int(self._device[state_block])

    def count(self, block_ids: NDArray[np.int32]) -> int:
        """Count the positions without a gap from the first of these blocks on."""
        filled = self._device[block_ids]
        gaps = np.flatnonzero(filled < self._block_size)
        first = int(gaps[0]) if len(gaps) else len(filled)
        return first * self._block_size + (int(filled[first]) if len(gaps) else 0)


class HiddenStatesKept(Protocol):
    """Memory for the hidden states of the model, for a head that reads them."""

    def states_of(self, hidden: HiddenStates) -> Tensor:
        """Turn the hidden states of a step into those that are kept, [T, H]."""

    def keep(
        self, blocks_ST: NDArray[np.int64], offsets_T: NDArray[np.int64], hidden_TH: Sequence[Tensor]
    ) -> None:
        """Keep the states of tokens at these places; of two at one place the later. They come in parts."""


_Followed = tuple[NDArray[np.int64], NDArray[np.int64], Tensor | None]
"""Blocks [S, T] and offsets [T] of a step, and the hidden states at these places."""


class DraftModel:
    """Passes of the draft model over rows of the worker. Only where the host knows every token."""

    def __init__(
        self,
        steps: StepRunner,
        rows: RowTable,
        sampler: RowSampler,
        sizes: DraftSizes,
        kept: HiddenStatesKept | None = None,
    ) -> None:
        self._kept = kept
        self._followed: list[_Followed] = []
        self._steps = steps
        self._rows = rows.keeping_all()  # as its layers do, though the model's may have windows
        self._sampler = sampler
        self._sizes = sizes
        self._filled = _Filled(sizes, rows.block_size)
        self._ahead: dict[int, _Ahead] = {}
        self.clock: Callable[[], float] = time.perf_counter

    def move_blocks(self, plan: SchedulerOutput) -> None:
        """Follow the copies of a plan, before its step; blocks may become those of states with it."""
        moves = plan.swap_out or plan.swap_in or plan.copies
        if moves or plan.new_sequences or plan.new_blocks or plan.taps or plan.released:
            self._take_in_steps()
        self._filled.move(plan)

    def remove(self, row: int) -> None:
        """Forget a row; an unknown one is ignored."""
        self._ahead.pop(row, None)

    def follow(self, inputs: StepInputs, hidden: HiddenStates | None) -> None:
        """Take in a step that the model has computed: there are other tokens than before at its places.

        Small steps without drafts are taken in together later on.
        """
        metadata = inputs.metadata
        hidden_TH = None if hidden is None or self._kept is None else self._kept.states_of(hidden)
        self._followed.append((metadata.token_blocks_ST, metadata.token_offsets, hidden_TH))
        if len(self._followed) == _MOST_FOLLOWED or len(inputs.rows_T) > _MOST_FOLLOWED:
            self._take_in_steps()
        if self._sizes.has_state:
            states = metadata.states
            self._filled.put(states.blocks_RS[states.is_first_R, 0], 0)
            self._filled.put(np.array([tap.blocks_S[0] for tap in states.taps], np.int64), 0)

    def _take_in_steps(self) -> None:
        """Take in the steps since the last time, in their order: a block may have changed hands."""
        if not self._followed:
            return
        blocks, offsets, states = zip(*self._followed, strict=True)
        self._followed = []
        blocks_ST, offsets_T = np.concatenate(blocks, axis=1), np.concatenate(offsets)
        if self._rows.leading_stripe >= 0:
            self._filled.lower(blocks_ST[self._rows.leading_stripe], offsets_T)
        if self._kept is not None:
            self._kept.keep(blocks_ST, offsets_T, [each for each in states if each is not None])

    def propose(self, wanted: Mapping[SequenceId, int]) -> DraftsMade:
        """Guess up to `wanted` tokens of each sequence, one place of all of them in a pass."""
        drafts: dict[SequenceId, list[int]] = {}
        passes: list[tuple[int, float]] = []
        began_s = self.clock()
        self._take_in_steps()
        shares, views = self._first_shares(wanted)
        num_ahead = self._sizes.num_ahead
        num_followed = {share.sequence_id: share.start + share.num_tokens + num_ahead for share in shares}
        try:
            while shares and (inputs := self._inputs(shares, drafts)) is not None:
                shares = []
                for sequence_id, token_id in self._guess(inputs, views).items():
                    drafts.setdefault(sequence_id, []).append(token_id)
                    views[sequence_id] = views[sequence_id].after(token_id)
                    row = self._rows.hold_drafts(sequence_id, (token_id,), self._sizes.sampled_vocab_size)
                    if len(drafts[sequence_id]) < wanted[sequence_id] and self._has_place(row):
                        num_again = len(drafts[sequence_id]) if self._sizes.has_state else 1
                        position = self._num_places(row) - num_again
                        shares.append(ScheduledSequence(sequence_id, position, num_again, samples=True))
                began_s, before_s = self.clock(), began_s
                passes.append((len(inputs.input_ids_T), began_s - before_s))
        finally:
            for sequence_id, each in drafts.items():
                row = self._row(sequence_id)
                self._rows.drop_drafts(row, len(each))
                if not num_ahead:  # else what they wrote came of guessed states: it is computed again
                    self._ahead[row] = _Ahead(int(self._rows.num_tokens_C[row]), tuple(each))
        found = {sequence_id: tuple(each) for sequence_id, each in drafts.items()}
        return DraftsMade(found, tuple(passes), num_followed)

    def _first_shares(
        self, wanted: Mapping[SequenceId, int]
    ) -> tuple[list[ScheduledSequence], dict[SequenceId, SamplingRow]]:
        """List what the draft model has not computed of each sequence, as much as a pass takes.

        A sequence that its last token ends is left out. Returns the states of the others too.
        """
        views: dict[SequenceId, SamplingRow] = {}
        starts: dict[SequenceId, int] = {}
        for sequence_id in wanted:
            row = self._rows.row_of(sequence_id)
            if row is None or not self._has_place(row):
                continue
            view = self._sampler.preview(row)
            if int(self._rows.tokens_of(row)[-1]) in view.params.stop_token_ids:
                continue
            views[sequence_id] = view
            # The last token is computed in any case, for its logits.
            starts[sequence_id] = self._num_filled(sequence_id, self._num_places(row) - 1)
        return self._shares_from(starts), views

    def _shares_from(self, starts: Mapping[SequenceId, int]) -> list[ScheduledSequence]:
        """List shares up to the last tokens, shortest first; of one that is too long for a pass, a part."""
        shares: list[ScheduledSequence] = []
        num_left = self._sizes.max_tokens
        lengths = {each: self._num_places(self._row(each)) - start for each, start in starts.items()}
        for sequence_id in sorted(starts, key=lengths.__getitem__):
            num_tokens = min(lengths[sequence_id], num_left)
            if num_tokens:
                is_whole = num_tokens == lengths[sequence_id]
                shares.append(
                    ScheduledSequence(sequence_id, starts[sequence_id], num_tokens, samples=is_whole)
                )
            num_left -= num_tokens
        return shares

    def _num_places(self, row: int) -> int:
        """Count the places of a row that can be computed."""
        return int(self._rows.num_tokens_C[row]) - self._sizes.num_ahead

    def _has_place(self, row: int) -> bool:
        """Tell whether the last token of a row can be computed."""
        return self._num_places(row) <= min(
            int(self._rows.num_slots(np.array([row]))[0]),
            self._sizes.max_len,
            self._rows.token_ids_CL.shape[1] - 1,
        )

    def _num_filled(self, sequence_id: SequenceId, end: int) -> int:
        """Count the leading positions of a sequence, `end` at most, whose keys and values are there."""
        row, num_filled = self._row(sequence_id), end
        if self._rows.leading_stripe >= 0:
            num_filled = self._num_with_keys(row, end)
        if not self._sizes.has_state:
            return num_filled
        num_taken = self._filled.taken(self._rows.state_blocks_CS[row, 0])
        return num_taken if num_taken <= num_filled else 0

    def _num_with_keys(self, row: int, end: int) -> int:
        self._take_in_ahead(row)
        blocks = self._table_of(row)[: -(-end // self._rows.block_size)]
        return min(self._filled.count(blocks), end)

    def _take_in_ahead(self, row: int) -> None:
        """Note the keys and values of drafts that turned out to be right."""
        ahead = self._ahead.pop(row, None)
        if ahead is None:
            return
        start, drafts = ahead
        sampled = self._rows.tokens_of(row)[start:].tolist()
        num_right = 0
        for draft, token_id in zip(drafts[:-1], sampled, strict=False):  # the last was never computed
            if draft != token_id:
                break
            num_right += 1
        positions = np.arange(start - 1, start + num_right)
        blocks = self._table_of(row)[positions // self._rows.block_size]
        self._filled.raise_to(blocks, positions % self._rows.block_size)

    def _guess(self, inputs: StepInputs, views: Mapping[SequenceId, SamplingRow]) -> dict[SequenceId, int]:
        """Compute a pass and sample from it; a sequence that would end has no guess."""
        logits_NV = self._compute(inputs)
        if not inputs.sequence_ids:
            return {}
        chosen = [views[each] for each in inputs.sequence_ids]
        guesses = self._sampler.guess(logits_NV, inputs.rows, chosen)
        return {
            sequence_id: token_id
            for sequence_id, view, token_id in zip(inputs.sequence_ids, chosen, guesses, strict=True)
            if token_id is not None and token_id not in view.params.stop_token_ids
        }

    def _inputs(
        self, shares: list[ScheduledSequence], drafts: Mapping[SequenceId, list[int]]
    ) -> StepInputs | None:
        """Build a pass; where there are drafts already, one of drafts alone, which no state takes in."""
        num_tokens = sum(share.num_tokens for share in shares)
        inputs = build_inputs(SchedulerOutput(0, (), (), {}, tuple(shares), num_tokens), self._rows, {})
        if inputs is None:
            return None
        ids_T = inputs.input_ids_T
        if self._sizes.num_ahead:
            places_T = inputs.position_ids_T + self._sizes.num_ahead
            ids_T = self._rows.token_ids_CL[inputs.rows_T, places_T].astype(np.int64)
        inputs = replace(inputs, input_ids_T=np.where(ids_T < self._sizes.vocab_size, ids_T, 0))
        if not (self._sizes.has_state and drafts):
            return inputs
        num_drafts_R = tuple(share.num_tokens for share in inputs.shares)
        return replace(inputs, metadata=replace(inputs.metadata, num_drafts_R=num_drafts_R))

    def _compute(self, inputs: StepInputs) -> Tensor:
        """Compute a pass; returns logits [N, V] as wide as the model's."""
        metadata = inputs.metadata
        changes_states = self._sizes.has_state and not metadata.num_drafts_R
        if changes_states:
            self._filled.put(metadata.state_blocks[:, 0], 0)  # should the pass fail
        logits_NV = self._steps.compute(inputs).logits_NV
        if changes_states:
            self._filled.put(metadata.state_blocks[:, 0], metadata.seq_lens)
        self._filled.raise_to(*self._places_of(inputs))
        num_more = self._sizes.sampled_vocab_size - logits_NV.shape[1]
        return pad(logits_NV, (0, num_more), value=-torch.inf) if num_more else logits_NV

    def _table_of(self, row: int) -> NDArray[np.int32]:
        """Return a row's blocks of the stripe that is followed: of the group that keeps most."""
        table_B: NDArray[np.int32] = self._rows.block_ids_SCB[self._rows.leading_stripe, row]
        return table_B

    def _places_of(self, inputs: StepInputs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the blocks of all tokens and the offsets within; none where states are all that is kept."""
        metadata, stripe = inputs.metadata, self._rows.leading_stripe
        if stripe < 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return metadata.token_blocks_ST[stripe], metadata.token_offsets

    def _row(self, sequence_id: SequenceId) -> int:
        row = self._rows.row_of(sequence_id)
        assert row is not None, "a plan asks for drafts of known sequences"
        return row


def _ends(copies: Sequence[BlockCopy]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sources and the targets of copies."""
    sources, targets = np.array(copies, np.int64).T
    return sources, targets
