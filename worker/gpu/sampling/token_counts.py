"""Counts of each token in each row's sequence, on the GPU, for penalties.

Owns: the counts of all rows, their first values, and the penalties of rows. Counts are allocated when the
first row with penalties comes.
Never: reads them on the host: sampled tokens are counted on the device, and no step waits for another.

Shapes: C rows of the worker, V vocabulary, E lines that are edited, N positions.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.messages import SamplingParams
from worker.devices.device import Device
from worker.gpu.sampling_kernels.penalties import GENERATED_ONCE, IN_PROMPT, Penalties, count_tokens, penalize
from worker.gpu.upload import upload


class GpuTokenCounts:
    """Counts of the rows that have penalties; the counts of others are left as they are."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: Device) -> None:
        self._num_rows, self._vocab_size, self._device = num_rows, vocab_size, device
        self._counts_CV: Tensor | None = None
        self._amounts_C3 = np.tile([1.0, 0.0, 0.0], (num_rows, 1))
        self._is_counted_C = np.zeros(num_rows, np.bool_)

    @torch.inference_mode()
    def begin_row(
        self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """Count a prompt and the tokens generated so far. Raises torch.OutOfMemoryError."""
        ids, place_of = np.unique(np.asarray(token_ids, np.int64), return_inverse=True)
        counts = np.zeros(len(ids), np.int32)
        np.add.at(counts, place_of[num_prompt_tokens:], GENERATED_ONCE)
        counts[place_of[:num_prompt_tokens]] |= IN_PROMPT
        on_device = upload(self._device, [ids, counts])
        counts_V = self._counts()[row]
        counts_V.zero_()
        counts_V.index_copy_(0, *on_device)
        self._is_counted_C[row] = True
        self._amounts_C3[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty

    def end_row(self, row: int) -> None:
        """Stop counting; without penalties this has no effect."""
        self._is_counted_C[row] = False

    def of_lines(self, rows_E: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The first two of Penalties, on the host, for lines that belong to these rows."""
        return np.where(self._is_counted_C[rows_E], rows_E, -1).astype(np.int32), self._amounts_C3[rows_E]

    def penalize(self, logits_EV: Tensor, rows_E: Tensor, amounts_E3: Tensor) -> None:
        """Apply to float32 logits, in place; see Penalties."""
        penalize(logits_EV, Penalties(rows_E, amounts_E3, self._counts()))

    def count(self, rows_E: Tensor, places_E: Tensor, outcome_2N: Tensor) -> None:
        count_tokens(self._counts(), rows_E, places_E, outcome_2N)

    def release(self) -> None:
        """Give the memory back; no row has penalties."""
        self._counts_CV = None

    def _counts(self) -> Tensor:
        if self._counts_CV is None:
            numel = self._num_rows * self._vocab_size
            self._counts_CV = self._device.zeros(numel, torch.int32).view(self._num_rows, self._vocab_size)
        return self._counts_CV
