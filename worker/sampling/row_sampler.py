"""What every sampler has: the state of each row, and results that the host may collect later.

Owns: rows by number, the order in which a row's state is told of what happens to it.
Never: logits (sampler.py and gpu/sampler.py), nor which sequence holds a row (row_table.py).

A token is asked for with `begin` and becomes known with `result`. A device may still be at work on it in
between, and a step that does not need to know it may begin:

    begin(step 1)   begin(step 2)   result(step 1)   begin(step 3)   result(step 2)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scheduler.messages import SamplingParams, TokenLogprobs
from worker.sampling.grammar_rows import Grammars
from worker.sampling.sampling_state import SamplingRow, TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What was drawn. Positions are those in the `rows` that were asked for."""

    token_ids: list[int]
    """One for each position; 0 and without meaning where the position failed."""
    logprobs: dict[int, TokenLogprobs]
    """By position, for rows that asked."""
    failed: dict[int, str]
    """By position: why no token could be drawn, for the log."""


class Drawing(NamedTuple):
    """What was asked of the device."""

    token_ids_N: Tensor
    """[N] int64 on the device of the logits, in the order of its work; 0 where a position fails."""
    collect: Callable[[], SampleResult]
    """Waits for the device where there is need to."""
    is_news: bool = True
    """False where the step that made the logits had drawn all of it."""


class PendingSample:
    """Tokens that are being drawn.

    It holds the states of its rows and not their numbers: a row may be freed, and taken by another sequence,
    before the result is collected.
    """

    def __init__(self, drawing: Drawing, states: Sequence[SamplingRow]) -> None:
        self.token_ids_N = drawing.token_ids_N
        self.is_news = drawing.is_news
        self._states = states
        self._learners = [(n, state) for n, state in enumerate(states) if state.learns]
        self._collect = drawing.collect
        self._result: SampleResult | None = None

    def result(self) -> SampleResult:
        """Wait for the tokens, and record them for their rows. Results of one row are collected in order."""
        if self._result is None:
            self._result = self._collect()
            for n in self._result.failed:
                self._states[n].withdraw()
            for n, state in self._learners:
                if n not in self._result.failed:
                    state.record(self._result.token_ids[n])
        return self._result


class RowSampler(ABC):
    """Draws tokens for rows; remembers of each row its parameters, its counts and its progress."""

    def __init__(self, *, vocab_size: int, grammars: Grammars | None = None) -> None:
        """Without `grammars` no row may have one."""
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._rows: dict[int, SamplingRow] = {}
        self._learners: set[int] = set()

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
            state.grammar = self._grammars.row(params.grammar, token_ids[num_prompt_tokens:])
        if state.is_penalized:
            self._begin_counting(row, state, token_ids, num_prompt_tokens)
        self._rows[row] = state
        if state.learns:
            self._learners.add(row)

    def remove_row(self, row: int) -> None:
        """Forget `row`; nothing happens if it is unknown."""
        self._rows.pop(row, None)
        self._learners.discard(row)

    def needs_history(self, rows: Sequence[int]) -> bool:
        """Whether results must be collected before `begin` is called for `rows`.

        So it is where what one of them may draw depends on a token of its own that is still pending.
        """
        return bool(self._learners) and any(self._rows[row].needs_history for row in rows)

    @torch.inference_mode()
    def begin(self, logits_NV: Tensor, rows: Sequence[int]) -> PendingSample:
        """Draw one token for each of `rows`, each once, from its line of the logits.

        logits_NV is [N, V] of any floating dtype on the sampler's device, and is not changed. -inf marks a
        token that cannot occur. A row fails alone, and draws nothing, if its logits hold a NaN or +inf,
        or if no token is left.
        """
        assert logits_NV.shape == (len(rows), self._vocab_size)
        states = [self._rows[row] for row in rows]
        drawing = self._draw(logits_NV, rows, states)
        for state in states:
            state.advance()
        return PendingSample(drawing, states)

    def sample(self, logits_NV: Tensor, rows: Sequence[int]) -> SampleResult:
        """`begin`, and wait for the result."""
        return self.begin(logits_NV, rows).result()

    def _begin_counting(
        self,
        row: int,  # noqa: ARG002 - for those who count elsewhere
        state: SamplingRow,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        """Count the tokens of a row with penalties, from now on."""
        history = np.asarray(token_ids, np.int64)
        state.counts = TokenCounts(history[:num_prompt_tokens], history[num_prompt_tokens:])

    @abstractmethod
    def _draw(self, logits_NV: Tensor, rows: Sequence[int], states: Sequence[SamplingRow]) -> Drawing:
        """What a PendingSample is made of."""
