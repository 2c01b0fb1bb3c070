"""What requests ask to be done to their logits, on a GPU: the counterpart of worker/logits.py.

Owns: the edited copies of logits, and what the host sends to make them.
Never: which rows ask for it (sampler.py), or waits for the device.

Shapes: N positions, E lines to be edited, V vocabulary, G masks, K words of a mask, S spans.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.device import Device
from worker.gpu.kernels.bitmask import copy_masked
from worker.gpu.kernels.penalties import Penalties, penalize
from worker.gpu.kernels.sampling import SPAN
from worker.gpu.upload import upload
from worker.grammar import Grammars
from worker.sampling_state import SamplingRow

_NUM_LOGITS = 1 << 24
"""64 MiB of float32: enough to fill a GPU, little beside its KV cache."""

_LINE_MULTIPLE = 128


class EditedLogits(NamedTuple):
    """Good until the next are made."""

    logits_EV: Tensor
    """float32."""
    faults_ES: Tensor
    """+inf where a span held a NaN or +inf before it was edited, else -inf."""


class _Listed(NamedTuple):
    """Places in the flattened logits."""

    where: NDArray[np.int64]
    values: NDArray[np.float32]


class LogitsEditor:
    """Edits copies of logits, of so many rows at once as its memory holds."""

    def __init__(self, *, vocab_size: int, device: Device, grammars: Grammars | None) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._width = -(-vocab_size // _LINE_MULTIPLE) * _LINE_MULTIPLE
        self.num_lines = max(1, _NUM_LOGITS // self._width)
        numel = self.num_lines * self._width
        self._scratch_EW = device.zeros(numel, torch.float32).view(self.num_lines, self._width)
        num_spans = -(-vocab_size // SPAN)
        self._faults_ES = device.zeros(self.num_lines * num_spans, torch.float32).view(-1, num_spans)

    def edit(self, logits_NV: Tensor, lines: Sequence[int], rows: Sequence[SamplingRow]) -> EditedLogits:
        """Copies of `lines` of the logits, edited as `rows` ask: one for each, and at most `num_lines`."""
        edited = EditedLogits(
            self._scratch_EW[: len(lines), : self._vocab_size], self._faults_ES[: len(lines)]
        )
        # First: whether a text is complete decides whether it may end before its minimum length.
        masks, mask_of = self._masks(rows)
        bias, banned = self._list_bias(rows), self._list_banned(rows)
        penalties = _list_penalties(rows)
        arrays: list[NDArray[Any]] = [
            np.stack((np.array(lines, np.int32), mask_of), axis=1),
            masks,
            *bias,
            banned,
            *penalties,
        ]
        lines_E2, masks_GK, bias_at, bias_values, banned_at, *penalized = upload(self._device, arrays)
        copy_masked(logits_NV, lines_E2, masks_GK if len(masks) else None, *edited)
        flat = self._scratch_EW.view(-1)
        if len(bias.where):
            flat.index_add_(0, bias_at, bias_values)
        if len(banned):
            flat.index_fill_(0, banned_at, -torch.inf)
        if len(penalties[0]):
            most_listed = int(np.diff(penalties[1]).max())
            penalize(edited.logits_EV, Penalties(*penalized), most_listed=most_listed)
        return edited

    def _masks(self, rows: Sequence[SamplingRow]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The distinct masks, and for each row which one is its own, or -1."""
        num_words = -(-self._vocab_size // 32)
        mask_of = np.full(len(rows), -1, np.int32)
        masked = [n for n, row in enumerate(rows) if _is_masked(row)]
        masks = np.full((len(masked), num_words), -1, np.int32)
        mask_of[masked] = np.arange(len(masked))
        grammars = [row.grammar for row in rows if row.grammar is not None and row.grammar.is_active]
        if grammars:
            assert self._grammars is not None, "a row with a grammar"
            lines = iter(self._grammars.bitmasks(grammars))
        for mask, n in zip(masks, masked, strict=True):
            row = rows[n]
            if row.grammar is not None and row.grammar.is_active:
                line = next(lines)[:num_words]
                mask[: len(line)] &= line
                mask[len(line) :] = 0
            if row.params.allowed_token_ids:
                mask &= row.allowed_bits
        return masks, mask_of

    def _list_bias(self, rows: Sequence[SamplingRow]) -> _Listed:
        where = [n * self._width + row.bias_ids for n, row in enumerate(rows)]
        return _Listed(np.concatenate(where), np.concatenate([row.bias_values for row in rows]))

    def _list_banned(self, rows: Sequence[SamplingRow]) -> NDArray[np.int64]:
        where = [n * self._width + ids for n, row in enumerate(rows) for ids in row.banned_ids()]
        return np.concatenate(where) if where else np.zeros(0, np.int64)


def _is_masked(row: SamplingRow) -> bool:
    return bool(row.params.allowed_token_ids) or (row.grammar is not None and row.grammar.is_active)


def _list_penalties(rows: Sequence[SamplingRow]) -> list[NDArray[Any]]:
    """The tensors of Penalties, in their order; without lines if nobody has any."""
    listed = [(n, row.params, row.counts) for n, row in enumerate(rows) if row.counts is not None]
    sizes = [len(counts.ids) for _, _, counts in listed]
    return [
        np.array([n for n, _, _ in listed], np.int32),
        np.cumsum([0, *sizes], dtype=np.int32),
        np.array(
            [
                (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
                for _, params, _ in listed
            ],
            np.float64,
        ),
        np.concatenate([np.zeros(0, np.int32), *(counts.ids.astype(np.int32) for _, _, counts in listed)]),
        np.concatenate([np.zeros(0, np.float32), *(counts.num_generated for _, _, counts in listed)]),
    ]
