"""Sampling on several ranks: one rank samples, and the others get its tokens with a later plan.

Owns: the samplers of all ranks. The tokens of a step go through `sampled` of the rank's stage: on their way
out where they are sampled, on their way in everywhere else (engine/core/rank_group.py). Those of a step with
drafts are exchanged within it, since the step itself ends with how many there are.
Never: draws on another rank than the first of the last stage, which alone has logits, grammars and penalties.

Shapes: N tokens that are sampled in a step, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scheduler.messages import SamplingParams
from worker.devices.device import Device
from worker.machine import usable_cores
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
_LARGE = 1 << 18
"""Logits of a step from which more threads pay for waking them."""


class LeadingSampler(Sampler):
    """Sampler of the rank that samples. Meanwhile the others of its stage sleep, and it has their threads."""

    def __init__(self, *, vocab_size: int, device: Device, grammars: Grammars, ranks: Ranks) -> None:
        super().__init__(vocab_size=vocab_size, device=device, grammars=grammars)
        self._ranks = ranks
        num_own = torch.get_num_threads()
        self._num_threads = max(num_own, min(ranks.size * num_own, usable_cores()))

    def _launch(
        self, logits_NV: Tensor, rows: Sequence[int], states: Sequence[SamplingRow]
    ) -> LaunchedSample:
        if logits_NV.numel() < _LARGE:
            launched = super()._launch(logits_NV, rows, states)
        else:
            num_own = torch.get_num_threads()
            torch.set_num_threads(self._num_threads)
            try:
                launched = super()._launch(logits_NV, rows, states)
            finally:
                torch.set_num_threads(num_own)

        def collect() -> SampleResult:
            result = launched.collect()
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
    """Sampler of the other ranks, whose tokens are in `sampled` before a result is asked for.

    A position that failed where it was sampled has its token 0 here too.
    """

    def __init__(self, *, vocab_size: int, ranks: Ranks) -> None:
        super().__init__(vocab_size=vocab_size)
        self._ranks = ranks

    def add_row(
        self,
        row: int,
        params: SamplingParams,  # noqa: ARG002 - read where tokens are sampled
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
            token_ids = self._ranks.stage.sampled.popleft()
            assert len(token_ids) == len(rows), "ranks do not compute the same"
            return SampleResult(token_ids=token_ids, logprobs={}, failed={})

        return LaunchedSample(torch.zeros(len(rows), dtype=torch.int64), collect)

    def verify(
        self,
        logits_NV: Tensor,  # noqa: ARG002 - read by rank 0
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
    ) -> list[VerifiedRow]:
        """See RowSampler. Tokens are recorded by the row table alone: nothing here depends on them."""
        del rows
        num_numbers = sum(2 + len(guesses) for guesses in drafts)
        numbers = iter(self._ranks.broadcast([0] * num_numbers))
        verified = []
        for guesses in drafts:
            num_tokens = next(numbers)
            token_ids = [next(numbers) for _ in range(1 + len(guesses))][:num_tokens]
            failure = "" if num_tokens else "it failed on rank 0"
            verified.append(VerifiedRow(token_ids=tuple(token_ids), logprobs=(), failure=failure))
        return verified
