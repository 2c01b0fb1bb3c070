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
from worker.sampling.row_sampler import LaunchedSample, RowSampler, SampleResult
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

    def _receive(self, num_tokens: int) -> list[int]:
        return self._ranks.broadcast([0] * num_tokens)


class StageSampler(FollowingSampler):
    """Sampler of all stages but the last, whose tokens are in `sampled` before a result is asked for."""

    def _receive(self, num_tokens: int) -> list[int]:
        token_ids = self._ranks.stage.sampled.popleft()
        assert len(token_ids) == num_tokens, "stages do not compute the same"
        return token_ids
