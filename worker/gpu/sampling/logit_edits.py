"""Edits of logits that requests ask for, on a GPU: the counterpart of worker/sampling/logits.py.

Shapes: N positions, E lines to be edited, V vocabulary, G masks, K words of a mask, S spans, F fields of
a draw.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.devices.device import Device
from worker.gpu.sampling.token_counts import GpuTokenCounts
from worker.gpu.sampling_kernels.bitmask import copy_masked
from worker.gpu.sampling_kernels.token_draw import SPAN, LogitRows
from worker.gpu.upload import upload
from worker.sampling.draw_fields import LINE, PLACE
from worker.sampling.grammar_rows import Grammars
from worker.sampling.logits import end_moves, move_end
from worker.sampling.state import SamplingRow

_NUM_LOGITS = 1 << 24
"""64 MiB of float32: enough to fill a GPU, little against its KV cache."""

_LINE_MULTIPLE = 128


_Naming = Sequence[tuple[int, SamplingRow]]
"""Rows that name tokens, with their lines."""


class EditedRow(NamedTuple):
    """A row whose logits are to be edited."""

    row: int
    """Its number in the worker."""
    place: int
    """The place of its logits in the step, and of its outcome."""
    state: SamplingRow


class _Listed(NamedTuple):
    """Places in the flattened logits."""

    where: NDArray[np.int64]
    values: NDArray[np.float32]


class EditedLogits(NamedTuple):
    """Good until the next are made."""

    lines: LogitRows
    """To draw from: the logits are float32, their faults +inf where a span held a NaN or +inf before it was
    edited, otherwise -inf."""
    rows_E: Tensor
    """int32: whose tokens are to be counted for penalties; -1 for others."""
    places_E: Tensor
    """int32."""
    has_penalties: bool


class LogitsEditor:
    """Editor of copies of logits, of as many rows at once as its memory holds."""

    def __init__(
        self, *, vocab_size: int, device: Device, grammars: Grammars | None, counts: GpuTokenCounts
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._counts = counts
        self._width = -(-vocab_size // _LINE_MULTIPLE) * _LINE_MULTIPLE
        self.num_lines = max(1, _NUM_LOGITS // self._width)
        numel = self.num_lines * self._width
        self._scratch_EW = device.zeros(numel, torch.float32).view(self.num_lines, self._width)
        num_spans = -(-vocab_size // SPAN)
        self._faults_ES = device.zeros(self.num_lines * num_spans, torch.float32).view(-1, num_spans)

    def edit(
        self, logits_NV: Tensor, rows: Sequence[EditedRow], draws_NF: NDArray[np.float64]
    ) -> EditedLogits:
        """Edited copies of the logits of `rows`: one for each, and at most `num_lines`.

        draws_NF has the sampling fields of each position of the step.
        """
        naming = [(line, each.state) for line, each in enumerate(rows) if each.state.names_tokens]
        # First: whether a text is complete decides whether it may end before its minimum length.
        masks, mask_of = self._masks(naming, len(rows))
        bias, banned = self._list_bias(naming), self._list_banned(naming)
        places = np.array([each.place for each in rows], np.int32)
        counted, amounts = self._counts.of_lines(np.array([each.row for each in rows], np.int64))
        has_penalties = bool(counted.max() >= 0)
        draws_EF = draws_NF[places]
        draws_EF[:, LINE], draws_EF[:, PLACE] = np.arange(len(rows)), places
        lines = np.stack((places, mask_of), axis=1)
        arrays: list[NDArray[Any]] = [draws_EF, counted, places, lines, amounts, masks, *bias, banned]
        on_device = upload(self._device, arrays)
        rows_MF, rows_E, places_E, lines_E2, amounts_E3, masks_GK, bias_at, bias_values, banned_at = on_device
        edited_EV, faults_ES = self._scratch_EW[: len(rows), : self._vocab_size], self._faults_ES[: len(rows)]
        copy_masked(logits_NV, lines_E2, masks_GK if len(masks) else None, edited_EV, faults_ES)
        flat = self._scratch_EW.view(-1)
        if len(bias.where):
            flat.index_add_(0, bias_at, bias_values)
        for into, out_of in end_moves(naming, width=self._width):
            move_end(flat, *upload(self._device, [into, out_of]))
        if len(banned):
            flat.index_fill_(0, banned_at, -torch.inf)
        if has_penalties:
            self._counts.penalize(edited_EV, rows_E, amounts_E3)
        self._close_thoughts(naming, edited_EV)
        return EditedLogits(LogitRows(edited_EV, rows_MF, faults_ES), rows_E, places_E, has_penalties)

    def _close_thoughts(self, naming: _Naming, edited_EV: Tensor) -> None:
        """Leave nothing but the mark to rows whose thoughts have had their tokens."""
        thinking = [(line, row.thoughts) for line, row in naming if row.thoughts is not None]
        closing = [(line, thoughts.closing_id) for line, thoughts in thinking if thoughts.must_close]
        if closing:
            lines_C, ids_C = upload(self._device, list(np.array(closing, np.int64).T.copy()))
            edited_EV.index_fill_(0, lines_C, -torch.inf)
            edited_EV.index_put_((lines_C, ids_C), edited_EV.new_zeros(()))

    def count(self, edited: EditedLogits, outcome_2N: Tensor) -> None:
        """Count the sampled tokens, for the next step."""
        if edited.has_penalties:
            self._counts.count(edited.rows_E, edited.places_E, outcome_2N)

    def _masks(self, naming: _Naming, num_lines: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The distinct masks, and for each line which one is its own, or -1."""
        num_words = -(-self._vocab_size // 32)
        mask_of = np.full(num_lines, -1, np.int32)
        masked = [(line, row) for line, row in naming if _is_masked(row)]
        masks = np.full((len(masked), num_words), -1, np.int32)
        mask_of[[line for line, _ in masked]] = np.arange(len(masked))
        grammars = [row.grammar for _, row in masked if row.grammar is not None and row.grammar.is_active]
        if grammars:
            assert self._grammars is not None, "a row with a grammar"
            lines = iter(self._grammars.bitmasks(grammars))
        for mask, (_, row) in zip(masks, masked, strict=True):
            if row.grammar is not None and row.grammar.is_active:
                line = next(lines)[:num_words]
                mask[: len(line)] &= line
                mask[len(line) :] = 0
            if row.params.allowed_token_ids:
                mask &= row.allowed_bits
        return masks, mask_of

    def _list_bias(self, naming: _Naming) -> _Listed:
        biased = [(line, row) for line, row in naming if len(row.bias_ids)]
        where = [line * self._width + row.bias_ids for line, row in biased]
        values = [row.bias_values for _, row in biased]
        return _Listed(_joined(where, np.int64), _joined(values, np.float32))

    def _list_banned(self, naming: _Naming) -> NDArray[np.int64]:
        where = [line * self._width + ids for line, row in naming for ids in row.banned_ids()]
        return _joined(where, np.int64)


def _joined(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _is_masked(row: SamplingRow) -> bool:
    return bool(row.params.allowed_token_ids) or (row.grammar is not None and row.grammar.is_active)
