"""Sampling on several ranks with a GPU each: the first samples, and its device tells the others.

Owns: the samplers of all ranks. The tokens of a step reach the devices of the others behind it, whatever
sampled them, and their hosts with a later plan (engine/core/stage_steps.py). Those of a step with drafts
reach the hosts within it, which know each token before the next step; no device needs them then.
Never: exchanges (gpu/runner.py).

Shapes: N tokens that are sampled in a step, V vocabulary, F fields of a row.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.devices.device import Device
from worker.gpu.sampling.draw_fields import no_draws
from worker.gpu.sampling.gpu_sampler import GpuSampler
from worker.ranks.ranks import Ranks
from worker.sampling.grammar_rows import Grammars
from worker.sampling.rank_samplers import FollowingSampler, verify_for_all
from worker.sampling.row_sampler import LaunchedSample, VerifiedRow
from worker.sampling.state import SamplingRow


class GpuLeadingSampler(GpuSampler):
    """Sampler of the first rank, which answers for all."""

    def __init__(
        self, *, vocab_size: int, max_num_seqs: int, device: Device, grammars: Grammars, ranks: Ranks
    ) -> None:
        super().__init__(vocab_size=vocab_size, max_num_seqs=max_num_seqs, device=device, grammars=grammars)
        self._ranks = ranks

    def _launch(
        self, logits_NV: Tensor, rows: Sequence[int], states: Sequence[SamplingRow]
    ) -> LaunchedSample:
        # The others do not know what the step itself has sampled.
        return super()._launch(logits_NV, rows, states)._replace(is_new=True)

    def verify(
        self, logits_NV: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> list[VerifiedRow]:
        """See RowSampler. The hosts of the others wait for it."""
        return verify_for_all(super().verify, logits_NV, rows, drafts, self._ranks)


class GpuFollowingSampler(FollowingSampler):
    """Sampler of the other ranks."""

    def __init__(self, *, vocab_size: int, max_num_seqs: int, device: Device, ranks: Ranks) -> None:
        super().__init__(vocab_size=vocab_size, device=device, ranks=ranks)
        self._token_ids_C = device.zeros(max_num_seqs, torch.int64)

    def draws_of_step(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """See StepSampler."""
        return no_draws(len(rows))

    def draw_in_step(self, logits_NV: Tensor, draws_NF: Tensor) -> Tensor:  # noqa: ARG002 - read by rank 0
        """See StepSampler. Nothing is sampled."""
        return self._token_ids_C[: len(draws_NF)]

    def warm_up(self, dtype: torch.dtype) -> None:
        """Do nothing: no kernel is used."""

    def _draw_own(self, logits_NV: Tensor, states: Sequence[SamplingRow]) -> None:
        """Draw nothing for the first rank."""

    def _tokens_of(self, num_rows: int) -> Tensor:
        return self._token_ids_C[:num_rows]
