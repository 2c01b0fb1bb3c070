"""Sampling on several ranks: one rank samples, and the others get its tokens with a later plan.

Owns: the samplers of all ranks. The tokens of a step go through `sampled` of the rank's stage: on their way
out where they are sampled, on their way in everywhere else.
Never: draws on another rank than the first of the last stage, which alone has logits, grammars and penalties;
or exchanges anything (engine/core/rank_group.py).

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
from worker.sampling.row_sampler import LaunchedSample, RowSampler, SampleResult
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
        num_own = torch.get_num_threads()
        torch.set_num_threads(self._num_threads if logits_NV.numel() >= _LARGE else num_own)
        try:
            launched = super()._launch(logits_NV, rows, states)
        finally:
            torch.set_num_threads(num_own)

        def collect() -> SampleResult:
            result = launched.collect()
            self._ranks.stage.sampled.append(result.token_ids)
            return result

        return launched._replace(collect=collect)


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
