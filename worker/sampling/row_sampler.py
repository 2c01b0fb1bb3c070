"""Base of all samplers: the state of each row, and results that the host may collect later.

Owns: rows by number, and the order in which a row's state is updated.

`begin` asks for a token, and `result` returns it. In between the device may still be sampling it, and a step
that does not depend on it may begin:

    begin(step 1)   begin(step 2)   result(step 1)   begin(step 3)   result(step 2)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scheduler.messages import SamplingParams, TokenLogprobs
from worker.ranks.ranks import ALONE, Ranks
from worker.sampling.compile_ahead import CompileAhead
from worker.sampling.grammar_rows import Grammars
from worker.sampling.state import RowTokenCounts, SamplingRow

FAILED = -1
"""Token that a rank sends for a row without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """Sampled tokens of one step. A position is an index into the `rows` that were asked for."""

    token_ids: list[int]
    """One for each position; 0, without meaning, for a position that failed."""
    logprobs: dict[int, TokenLogprobs]
    """Reports by position, for rows that asked."""
    failed: dict[int, str]
    """Reasons by position why no token could be sampled, for the log."""
    unfit: frozenset[int] = frozenset()
    """Positions in `failed` that failed by their own grammar; the reason is fit for the caller's eyes."""


class LaunchedSample(NamedTuple):
    """Sampling that the device was asked for."""

    token_ids_N: Tensor
    """[N] int64 on the device of the logits, in the order of its work; 0 where a position fails."""
    collect: Callable[[], SampleResult]
    """Waits for the device if the result is not there yet."""
    is_new: bool = True
    """False if the step that computed the logits has sampled all of these tokens already."""


class PendingSample:
    """Tokens that are being sampled.

    It holds the states of its rows and not their numbers: a row may be freed, and taken by another sequence,
    before the result is collected.
    """

    def __init__(self, launched: LaunchedSample, states: Sequence[SamplingRow]) -> None:
        self.token_ids_N = launched.token_ids_N
        self.is_new = launched.is_new
        self._states = states
        self._learners = [(n, state) for n, state in enumerate(states) if state.learns]
        self._collect = launched.collect
        self._result: SampleResult | None = None

    def result(self) -> SampleResult:
        """Wait for the tokens, and record them for their rows. Results of one row are collected in order."""
        if self._result is None:
            self._result = self._collect()
            if self._result.failed:
                unfit = frozenset(n for n in self._result.failed if self._states[n].is_unfit)
                self._result = replace(self._result, unfit=unfit)
            for n in self._result.failed:
                self._states[n].withdraw()
            for n, state in self._learners:
                if n not in self._result.failed:
                    state.record(self._result.token_ids[n])
        return self._result


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRow:
    """Tokens that one row sampled in a step with drafts."""

    token_ids: tuple[int, ...]
    """The drafts that were sampled too, and one token more; none if the row failed."""
    logprobs: tuple[TokenLogprobs, ...]
    """Reports aligned with `token_ids`, for a row that asked."""
    failure: str = ""
    """Reason why no token could be sampled, for the log."""
    is_unfit: bool = False
    """Whether its own grammar is the reason."""


class DraftedPlace(NamedTuple):
    """One position of a row in a step with drafts."""

    row: int
    line: int
    """Its line of the logits."""
    state: SamplingRow
    """The row's state with the drafts before it taken in."""
    draft: int | None
    """The draft behind it; None at the end."""


class RowSampler(ABC):
    """Sampler of rows, with the parameters, the counts and the progress of each."""

    def __init__(self, *, vocab_size: int, grammars: Grammars | None = None, ranks: Ranks = ALONE) -> None:
        """Without `grammars` no row may have one. `ranks` get their tokens from rank 0."""
        self._vocab_size = vocab_size
        self._ranks = ranks
        self._grammars = grammars
        self.compile_ahead = None if grammars is None else CompileAhead(grammars.row_ahead)
        """The side that compiles grammars of rows before they are added."""
        self._rows: dict[int, SamplingRow] = {}
        self._learners: set[int] = set()

    @property
    def is_shared(self) -> bool:
        """Whether other ranks need the tokens of a step."""
        return self._ranks.size > 1

    def add_row(
        self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """Take `row` into use, on admission and again after a preemption.

        token_ids are the prompt and all that was generated so far.
        """
        state = SamplingRow(
            params, token_ids, num_prompt_tokens=num_prompt_tokens, vocab_size=self._vocab_size
        )
        if params.grammar is not None:
            assert self._grammars is not None, "a sampler without grammars"
            assert self.compile_ahead is not None
            text = params.grammar, token_ids[num_prompt_tokens:]
            state.grammar = self.compile_ahead.take_row(*text) or self._grammars.row(*text)
        if state.is_penalized:
            self._begin_counting(row, state, token_ids, num_prompt_tokens)
        self._rows[row] = state
        if state.learns:
            self._learners.add(row)

    def remove_row(self, row: int) -> None:
        """Forget `row`; nothing happens if it is unknown."""
        state = self._rows.pop(row, None)
        self._learners.discard(row)
        if state is not None and state.grammar is not None and self.compile_ahead is not None:
            self.compile_ahead.free(state.grammar)

    def needs_history(self, rows: Sequence[int]) -> bool:
        """Whether results must be collected before `begin` is called for `rows`.

        That is so if the next token of a row depends on a token of its own that is still pending.
        """
        return bool(self._learners) and any(self._rows[row].needs_history for row in rows)

    @torch.inference_mode()
    def begin(self, logits_NV: Tensor, rows: Sequence[int]) -> PendingSample:
        """Sample one token for each of `rows`, which are distinct, from its line of the logits.

        logits_NV is [N, V] of any floating dtype on the sampler's device, and is not changed. -inf marks a
        token that cannot occur. A row fails alone, without a token, if its logits hold a NaN or +inf,
        or if no token is left.
        """
        assert logits_NV.shape == (len(rows), self._vocab_size)
        states = [self._rows[row] for row in rows]
        self._begin_masks(states)
        launched = self._launch(logits_NV, rows, states)
        for state in states:
            state.advance()
        return PendingSample(launched, states)

    def sample(self, logits_NV: Tensor, rows: Sequence[int]) -> SampleResult:
        """Call `begin` and wait for the result."""
        return self.begin(logits_NV, rows).result()

    def possible_drafts(self, row: int, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Cut drafts before the first that cannot be sampled, or that would end the sequence anyway."""
        if not drafts:
            return drafts
        state = self._rows[row]
        drafts = _before_stop(drafts, state)
        if state.grammar is not None:
            drafts = drafts[: state.grammar.num_allowed(drafts)]
        return drafts

    @torch.inference_mode()
    def verify(
        self, logits_NV: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> list[VerifiedRow]:
        """Sample a token behind each draft, as `begin` would, and keep drafts while they equal the sample.

        The logits have 1 + k lines for a row with k drafts: that of its last token, then one for each draft.
        Tokens are recorded as after `begin`. All earlier results of these rows must have been collected.
        The other ranks wait for the tokens within the step, as their next step depends on how many there are.
        """
        self._begin_masks([self._rows[row] for row in rows])
        places: list[DraftedPlace] = []
        firsts: list[int] = []
        line = 0
        for row, guesses in zip(rows, drafts, strict=True):
            firsts.append(len(places))
            views = self._views(self._rows[row], guesses)
            followers = (*guesses[: len(views) - 1], None)
            places += [
                DraftedPlace(row, line + place, view, draft)
                for place, (view, draft) in enumerate(zip(views, followers, strict=True))
            ]
            line += 1 + len(guesses)
        result = self._sample_places(logits_NV, places)
        firsts.append(len(places))
        verified = []
        for row, guesses, first, end in zip(rows, drafts, firsts, firsts[1:], strict=False):
            found = _longest_right(result, range(first, end), guesses)
            if found.failure:
                found = replace(found, is_unfit=places[first].state.is_unfit)
            self._take(row, found)
            verified.append(found)
        self._ranks.broadcast(_as_numbers(verified, drafts))
        return verified

    def _sample_places(self, logits_NV: Tensor, places: Sequence[DraftedPlace]) -> SampleResult:
        """Sample a token at each place. Places behind a draft that is wrong may be left out."""
        logits_NV = lines_of(logits_NV, [each.line for each in places])
        return self._launch(
            logits_NV, [each.row for each in places], [each.state for each in places]
        ).collect()

    def _take(self, row: int, found: VerifiedRow) -> None:
        """Record the tokens of a row that were verified."""
        for token_id in found.token_ids:
            self._rows[row].advance()
            self._rows[row].record(token_id)

    def preview(self, row: int) -> SamplingRow:
        """Copy the state of a row, for guesses at its tokens: without its grammar and its reports."""
        view = copy(self._rows[row])
        view.grammar = None  # its masks are paid for by the row, which guesses must not do
        view.params = replace(view.params, num_logprobs=None)
        return view

    @torch.inference_mode()
    def guess(self, logits_NV: Tensor, rows: Sequence[int], views: Sequence[SamplingRow]) -> list[int | None]:
        """Sample as `begin` would for rows in such states; None where no token is left. Records nothing.

        The uniform of a place is that of the row, so that a model with similar probabilities often guesses
        the token that the row will sample there. The other ranks get the guesses of rank 0.
        """
        result = self._sample_guesses(logits_NV, rows, views)
        guesses = [FAILED if n in result.failed else token for n, token in enumerate(result.token_ids)]
        return [None if token == FAILED else token for token in self._ranks.broadcast(guesses)]

    def _begin_masks(self, states: Sequence[SamplingRow]) -> None:
        """Open the account of a step's masks, of which each active grammar has an equal share."""
        if self._grammars is not None:
            self._grammars.begin_step(
                sum(state.grammar is not None and state.grammar.is_active for state in states)
            )

    def _views(self, state: SamplingRow, drafts: Sequence[int]) -> list[SamplingRow]:
        """List the state of a row now and after each of `drafts`, up to one that is impossible or ends it."""
        drafts = _before_stop(drafts, state)
        views = [state]
        for draft in drafts:
            views.append(views[-1].after(draft))
        if state.grammar is None or not drafts or self._grammars is None:
            return views
        grammars = self._grammars.along(state.grammar, drafts)
        views[0] = copy(state)  # not the row itself: its matcher goes on
        for view, grammar in zip(views, grammars, strict=False):
            view.grammar = grammar
        return views[: len(grammars)]

    def _begin_counting(
        self,
        row: int,  # noqa: ARG002 - for samplers that count elsewhere
        state: SamplingRow,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        """Count the tokens of a row with penalties, from now on."""
        history = np.asarray(token_ids, np.int64)
        state.counts = RowTokenCounts(history[:num_prompt_tokens], history[num_prompt_tokens:])

    @abstractmethod
    def _sample_guesses(
        self, logits_NV: Tensor, rows: Sequence[int], views: Sequence[SamplingRow]
    ) -> SampleResult:
        """Sample for `guess`, and wait for the result."""

    @abstractmethod
    def _launch(
        self, logits_NV: Tensor, rows: Sequence[int], states: Sequence[SamplingRow]
    ) -> LaunchedSample:
        """Sample on the device, for a PendingSample."""


def lines_of(logits_NV: Tensor, lines: list[int]) -> Tensor:
    """Select lines in ascending order; all of them are not copied."""
    if len(lines) == len(logits_NV):
        return logits_NV
    return logits_NV[torch.tensor(lines, device=logits_NV.device)]


def _before_stop(drafts: Sequence[int], state: SamplingRow) -> tuple[int, ...]:
    return tuple(takewhile(lambda each: each not in state.params.stop_token_ids, drafts))


def _as_numbers(verified: Sequence[VerifiedRow], drafts: Sequence[Sequence[int]]) -> list[int]:
    """Write each row's tokens as FollowingSampler reads them: how many, and one number for each place."""
    numbers: list[int] = []
    for found, guesses in zip(verified, drafts, strict=True):
        num_tokens = len(found.token_ids)
        numbers += (num_tokens, *found.token_ids, *[0] * (1 + len(guesses) - num_tokens))
    return numbers


def _longest_right(result: SampleResult, positions: range, drafts: Sequence[int]) -> VerifiedRow:
    """Keep samples up to the first that differs from its draft; one that failed behind others is left out.

    The next step computes such a position again, and fails there.
    """
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for place, position in enumerate(positions):
        if position in result.failed:
            break
        token_ids.append(result.token_ids[position])
        if position in result.logprobs:
            logprobs.append(result.logprobs[position])
        if place < len(drafts) and drafts[place] != token_ids[-1]:
            break
    failure = "" if token_ids else result.failed[positions[0]]
    return VerifiedRow(token_ids=tuple(token_ids), logprobs=tuple(logprobs), failure=failure)
