"""The sampler of the ranks that follow: their tokens come from the first rank of the last stage.

Owns: which rows a following rank draws, and the tokens of the rest. On CPUs all ranks of the last stage have
the logits, so each draws some of the plain rows: those whose token follows from logits, seed and place alone.
The first rank (Sampler, GpuSampler) has grammars, counts and reports, samples all other rows, and gets these
tokens within the step. On GPUs it samples every row, and its device sends the tokens (gpu/runner.py).
The hosts find the tokens of a step in `sampled` of their stage (engine/core/worker_steps.py). Those of a step
with drafts are broadcast within it, since its length depends on them.
Never: decides by anything but the plan, or the ranks would exchange different numbers.

Shapes: N tokens that are sampled in a step, V vocabulary, F fields of a row, C rows of the worker.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.messages import SamplingParams
from worker.devices.device import Device
from worker.ranks.ranks import Ranks
from worker.sampling.draw_fields import no_draws
from worker.sampling.row_sampler import FAILED, LaunchedSample, RowSampler, SampleResult, VerifiedRow
from worker.sampling.sampler import Sampler, divide_lines
from worker.sampling.state import SamplingRow

_UNREAD = SamplingParams(num_logprobs=0)
"""Stand-in for parameters that the first rank alone reads; as those, it makes no plain row."""


class FollowingSampler(RowSampler):
    """Sampler of the other ranks, whose tokens are in `sampled` before a result is asked for.

    A position that failed where it was sampled has its token 0 here too.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_num_seqs: int,
        device: Device,
        ranks: Ranks,
        drawn_by: Sampler | None = None,
    ) -> None:
        """With `drawn_by`, draw this rank's part of plain rows for a Sampler of the first rank."""
        super().__init__(vocab_size=vocab_size, ranks=ranks)
        self._drawn_by = drawn_by
        # Filled by the runner on GPUs, behind the step; hosts do not read it.
        self._token_ids_C = device.zeros(max_num_seqs, torch.int64)

    def add_row(
        self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        state = SamplingRow(
            params, token_ids, num_prompt_tokens=num_prompt_tokens, vocab_size=self._vocab_size
        )
        if not state.is_plain:  # what ends a sequence ends its drafts on all ranks
            params = replace(_UNREAD, stop_token_ids=params.stop_token_ids)
        super().add_row(row, params, token_ids, num_prompt_tokens)

    def _launch(
        self, logits_NV: Tensor, rows: Sequence[int], states: Sequence[SamplingRow]
    ) -> LaunchedSample:
        if self._drawn_by is not None and self._ranks.stage.is_last:
            self._draw_own(self._drawn_by, logits_NV, states)

        def collect() -> SampleResult:
            token_ids = self._ranks.stage.sampled.popleft()
            assert len(token_ids) == len(rows), "ranks do not compute the same"
            return SampleResult(token_ids=token_ids, logprobs={}, failed={})

        return LaunchedSample(self._token_ids_C[: len(rows)], collect)

    def _draw_own(self, drawn_by: Sampler, logits_NV: Tensor, states: Sequence[SamplingRow]) -> None:
        """Draw this rank's part of a step for the first rank."""
        _, *others = divide_lines(states, self._ranks.size)
        num_most = max(map(len, others), default=0)
        if num_most == 0:
            return
        own = others[self._ranks.rank - 1]
        result = drawn_by.sample_lines(logits_NV, own, states)
        token_ids = [FAILED if n in result.failed else result.token_ids[n] for n in own]
        self._ranks.of_all([*token_ids, *[0] * (num_most - len(own))])

    def verify(
        self,
        logits_NV: Tensor,  # noqa: ARG002 - read by rank 0
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
    ) -> list[VerifiedRow]:
        num_numbers = sum(2 + len(guesses) for guesses in drafts)
        numbers = iter(self._ranks.broadcast([0] * num_numbers))
        verified = []
        for row, guesses in zip(rows, drafts, strict=True):
            num_tokens = next(numbers)
            token_ids = [next(numbers) for _ in range(1 + len(guesses))][:num_tokens]
            failure = "" if num_tokens else "it failed on rank 0"
            verified.append(VerifiedRow(token_ids=tuple(token_ids), logprobs=(), failure=failure))
            self._take(row, verified[-1])
        return verified

    def _sample_guesses(
        self,
        logits_NV: Tensor,  # noqa: ARG002 - read by rank 0
        rows: Sequence[int],
        views: Sequence[SamplingRow],  # noqa: ARG002
    ) -> SampleResult:
        return SampleResult(token_ids=[0] * len(rows), logprobs={}, failed={})

    def draws_of_step(self, rows: Sequence[int]) -> NDArray[np.float64]:
        return no_draws(len(rows))

    def draw_in_step(self, logits_NV: Tensor, draws_NF: Tensor) -> Tensor:  # noqa: ARG002 - read by rank 0
        """See StepSampler. Nothing is sampled."""
        return self._token_ids_C[: len(draws_NF)]

    def warm_up(self, dtype: torch.dtype) -> None:
        """Do nothing: no kernel is used."""
