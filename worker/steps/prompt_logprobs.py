"""Log-probabilities of the tokens of prompts, for sequences that ask for them.

Owns: the sequences that ask, and the tokens of a step that are scored for them.

The logits of a whole prompt would be the largest tensor of all: 2,048 tokens of 150,000 logits are 1.2 GB.
They are computed, reported and dropped a slice at a time.

Shapes: T tokens of the step, S tokens of a slice, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scheduler.messages import NewSequence, ScheduledSequence, SequenceId, TokenLogprobs
from worker.sampling.logits import Alternatives, report_logprobs
from worker.steps.row_table import RowTable

Head = Callable[[NDArray[np.int64]], Tensor]
"""Computes logits [S, V] of some tokens of a step, those of a sequence in their order."""
_SLICE_LOGITS = 1 << 23
"""32 MiB of float32; their report takes about three times as much for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    num_top: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Tokens of one share whose logits score the token that follows each in the prompt."""

    sequence_id: SequenceId
    start: int
    """Index into T of the first."""
    next_ids: list[int]
    """The token that follows each."""
    num_top: int

    def cut(self, size: int) -> "Iterator[_Wanted]":
        for at in range(0, len(self.next_ids), size):
            yield _Wanted(
                sequence_id=self.sequence_id,
                start=self.start + at,
                next_ids=self.next_ids[at : at + size],
                num_top=self.num_top,
            )


@dataclass(slots=True)
class PromptReport:
    """Log-probabilities and failures of one step."""

    logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failures: dict[SequenceId, str] = field(default_factory=dict)


class PromptScorer:
    """Scores of prompts, for sequences that ask for them at admission."""

    def __init__(self, vocab_size: int) -> None:
        self._slice_tokens = max(1, _SLICE_LOGITS // vocab_size)
        self._asked: dict[SequenceId, _Asked] = {}

    def add(self, new: NewSequence) -> None:
        num_top = new.params.num_prompt_logprobs
        if num_top is not None:
            self._asked[new.sequence_id] = _Asked(num_top=num_top, num_prompt_tokens=new.num_prompt_tokens)

    def remove(self, sequence_id: SequenceId) -> None:
        """Forget a sequence; one that never asked is ignored."""
        self._asked.pop(sequence_id, None)

    def wanted(self, shares: list[ScheduledSequence], rows: RowTable) -> list[_Wanted]:
        """List the tokens of this step to score; empty for nearly every step."""
        return [] if not self._asked else list(self._find(shares, rows))

    def report(self, wanted: list[_Wanted], head: Head, found: PromptReport) -> None:
        """Report each prompt token that follows a computed one, in order. Waits for the device.

        A sequence whose logits are not finite fails alone.
        """
        for part in (part for each in wanted for part in each.cut(self._slice_tokens)):
            indices_S = np.arange(part.start, part.start + len(part.next_ids))
            logits_SV = head(indices_S).float()
            if not bool(logits_SV.amax(-1).isfinite().all()):
                found.failures[part.sequence_id] = "logits of the prompt are not finite"
                continue
            alternatives = [Alternatives(part.num_top)] * len(part.next_ids)
            entries = report_logprobs(logits_SV, part.next_ids, alternatives)
            found.logprobs[part.sequence_id] = (*found.logprobs.get(part.sequence_id, ()), *entries)

    def _find(self, shares: list[ScheduledSequence], rows: RowTable) -> Iterator[_Wanted]:
        start = 0
        for share in shares:
            asked, row = self._asked.get(share.sequence_id), rows.row_of(share.sequence_id)
            if asked is not None and row is not None:
                # The last token of the prompt scores the first generated one, which the sampler reports.
                end = min(share.start + share.num_tokens, asked.num_prompt_tokens - 1)
                next_ids = rows.token_ids_CL[row, share.start + 1 : end + 1].tolist()
                if share.start < end:
                    yield _Wanted(
                        sequence_id=share.sequence_id, start=start, next_ids=next_ids, num_top=asked.num_top
                    )
            start += share.num_tokens
