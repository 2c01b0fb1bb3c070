"""Sampling on several ranks: rank 0 samples, and the others get its tokens.

Owns: the exchange of tokens, one in each step that samples.
Never: draws on another rank than 0, which alone has logits, grammars and penalties.

Shapes: N tokens that are sampled in a step, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scheduler.messages import SamplingParams
from worker.devices.device import Device
from worker.ranks.ranks import Ranks
from worker.sampling.grammar_rows import Grammars
from worker.sampling.row_sampler import (
    DraftedPlace,
    LaunchedSample,
    RowSampler,
    SampleResult,
    VerifiedRow,
    lines_of,
)
from worker.sampling.sampler import Sampler
from worker.sampling.sampling_state import SamplingRow

_UNREAD = SamplingParams(temperature=0.0)


class LeadingSampler(Sampler):
    """Sampler of rank 0, which sends each step's tokens to the others."""

    def __init__(self, *, vocab_size: int, device: Device, grammars: Grammars, ranks: Ranks) -> None:
        super().__init__(vocab_size=vocab_size, device=device, grammars=grammars)
        self._ranks = ranks

    def _launch(
        self, logits_NV: Tensor, rows: Sequence[int], states: Sequence[SamplingRow]
    ) -> LaunchedSample:
        launched = super()._launch(logits_NV, rows, states)

        def collect() -> SampleResult:
            result = launched.collect()
            self._ranks.broadcast(result.token_ids)
            if self._ranks.stage.count > 1:
                self._ranks.stage.sampled.append(result.token_ids)
            return result

        return launched._replace(collect=collect)

    def verify(
        self, logits_NV: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> list[VerifiedRow]:
        """See RowSampler. The others get as many numbers as there are places, and one for each row."""
        verified = super().verify(logits_NV, rows, drafts)
        numbers: list[int] = []
        for found, guesses in zip(verified, drafts, strict=True):
            num_tokens = len(found.token_ids)
            numbers += (num_tokens, *found.token_ids, *[0] * (1 + len(guesses) - num_tokens))
        self._ranks.broadcast(numbers)
        return verified

    def _sample_places(self, logits_NV: Tensor, places: Sequence[DraftedPlace]) -> SampleResult:
        lines_NV = lines_of(logits_NV, [each.line for each in places])
        return super()._launch(lines_NV, (), [each.state for each in places]).collect()


class FollowingSampler(RowSampler):
    """Sampler of the other ranks. A position that failed on rank 0 has its token 0 here too."""

    def __init__(self, *, vocab_size: int, ranks: Ranks) -> None:
        super().__init__(vocab_size=vocab_size)
        self._ranks = ranks

    def add_row(
        self,
        row: int,
        params: SamplingParams,  # noqa: ARG002 - read by rank 0
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        """See RowSampler."""
        super().add_row(row, _UNREAD, token_ids, num_prompt_tokens)

    def _launch(
        self, logits_NV: Tensor, rows: Sequence[int], states: Sequence[SamplingRow]
    ) -> LaunchedSample:
        del logits_NV, states

        def collect() -> SampleResult:
            return SampleResult(token_ids=self._receive(len(rows)), logprobs={}, failed={})

        return LaunchedSample(torch.zeros(len(rows), dtype=torch.int64), collect)

    def verify(
        self,
        logits_NV: Tensor,  # noqa: ARG002 - read by rank 0
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
    ) -> list[VerifiedRow]:
        """See RowSampler. Tokens are recorded by the row table alone: nothing here depends on them."""
        del rows
        numbers = iter(self._receive(sum(2 + len(guesses) for guesses in drafts)))
        verified = []
        for guesses in drafts:
            num_tokens = next(numbers)
            token_ids = [next(numbers) for _ in range(1 + len(guesses))][:num_tokens]
            failure = "" if num_tokens else "it failed on rank 0"
            verified.append(VerifiedRow(token_ids=tuple(token_ids), logprobs=(), failure=failure))
        return verified

    def _receive(self, num_tokens: int) -> list[int]:
        return self._ranks.broadcast([0] * num_tokens)


class StageSampler(FollowingSampler):
    """Sampler of all stages but the last, whose tokens are in `sampled` before a result is asked for."""

    def _receive(self, num_tokens: int) -> list[int]:
        token_ids = self._ranks.stage.sampled.popleft()
        assert len(token_ids) == num_tokens, "stages do not compute the same"
        return token_ids
