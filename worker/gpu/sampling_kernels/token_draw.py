"""Sampling without the host: the maximum of logits, or inverse CDF after exact truncation.

Owns: the kernels, and how the vocabulary is divided among their programs.
Source: worker/sampling/draw.py defines the tokens.

    logits    |    |    |    |    |    |    |    |    |    |    |    |     blocks of BLOCK logits
    maxima     3.1  2.0  9.4  1.1  7.7  0.2  5.0  2.5  6.1  1.9  0.4      one for each block
    peaks     [        9.4       ][        7.7       ][        6.1   ]    one for each span of blocks
    sums      [  mass of weights ][                  ][              ]    for sampling from the whole row

Everything but truncation is one or two passes by many programs for each row, and a look into one block or
span. Truncation is one program's work for each row; it finds its tokens by the maxima, and reads a fifth of
the row. Only tokens beyond its list make it read the row again, some five times.

Shapes: N positions, M rows at work, F fields of one, L lines, V vocabulary, B blocks, S spans, C candidates.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.gpu.sampling_kernels.candidates import BLOCK, list_candidates
from worker.gpu.sampling_kernels.token_weights import (
    AT_LINE,
    AT_PLACE,
    AT_TOP_K,
    AT_TOP_P,
    FIELDS_PER_ROW,
    bits_of,
    least_bits,
    mass_before,
    mass_of,
    temperature_of,
    weigh,
)
from worker.gpu.sampling_kernels.truncation import CAPACITY, draw_truncated

_SPAN_BLOCKS = tl.constexpr(32)
SPAN = _SPAN_BLOCKS.value * BLOCK.value
"""Logits that one program reads."""
_SPAN = tl.constexpr(SPAN)


class Workspace(NamedTuple):
    """Memory between the kernels, for one launch after the other in the device's order."""

    maxima_MB: Tensor
    peaks_MS: Tensor
    """float32; +inf where the span holds a NaN or +inf."""
    sums_MS: Tensor
    blocks_MB: Tensor
    candidates_MC: Tensor
    candidate_ids_MC: Tensor

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device) -> "Workspace":
        """Allocate for up to `num_rows` rows at once; 45 KiB for each at 150,000 logits."""
        num_blocks, num_spans = triton.cdiv(vocab_size, BLOCK.value), triton.cdiv(vocab_size, SPAN)

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((num_rows, width), dtype=dtype, device=device)

        return cls(
            maxima_MB=empty(num_blocks, torch.float32),
            peaks_MS=empty(num_spans, torch.float32),
            sums_MS=empty(num_spans, torch.int64),
            blocks_MB=empty(num_blocks, torch.int32),
            candidates_MC=empty(CAPACITY.value, torch.float32),
            candidate_ids_MC=empty(CAPACITY.value, torch.int32),
        )


class LogitRows(NamedTuple):
    """Logits in lines, of any floating dtype, and which of them are at work."""

    logits_LV: Tensor
    rows_MF: Tensor
    """float64; see sampling/draw_fields.py. A row whose line is -1 is padding, and fails."""
    faults_MS: Tensor | None = None
    """+inf where a span was unsound before it was edited, otherwise -inf."""


def pick_best(lines: LogitRows, outcome_2N: Tensor, work: Workspace) -> None:
    """The most likely token of each row, of equals the lowest id: one pass over the logits.

    outcome_2N is int64: first the token, or 0, then whether the row failed.
    """
    _find_peaks(lines, work)
    num_blocks, num_spans = work.maxima_MB.shape[1], work.peaks_MS.shape[1]
    _best_kernel[(len(lines.rows_MF),)](
        lines.logits_LV,
        lines.rows_MF,
        work.maxima_MB,
        work.peaks_MS,
        outcome_2N,
        lines.logits_LV.stride(0),
        outcome_2N.shape[1],
        lines.logits_LV.shape[1],
        num_blocks,
        num_spans,
        ALL_BLOCKS=triton.next_power_of_2(num_blocks),
        ALL_SPANS=triton.next_power_of_2(num_spans),
    )


def draw(lines: LogitRows, outcome_2N: Tensor, work: Workspace) -> None:
    """Sample rows of which some are not greedy; see `pick_best`."""
    _find_peaks(lines, work)
    num_rows, num_tokens = len(lines.rows_MF), lines.logits_LV.shape[1]
    num_blocks, num_spans = work.maxima_MB.shape[1], work.peaks_MS.shape[1]
    stride, all_spans = lines.logits_LV.stride(0), triton.next_power_of_2(num_spans)
    _sums_kernel[(num_rows, num_spans)](
        lines.logits_LV,
        lines.rows_MF,
        work.peaks_MS,
        work.sums_MS,
        stride,
        num_tokens,
        num_spans,
        ALL_SPANS=all_spans,
    )
    _draw_kernel[(num_rows,)](
        lines.logits_LV,
        lines.rows_MF,
        *work,
        outcome_2N,
        stride,
        outcome_2N.shape[1],
        num_tokens,
        num_blocks,
        num_spans,
        ALL_BLOCKS=triton.next_power_of_2(num_blocks),
        ALL_SPANS=all_spans,
        num_warps=16,
    )


def _find_peaks(lines: LogitRows, work: Workspace) -> None:
    assert lines.logits_LV.stride(1) == 1
    assert lines.rows_MF.is_contiguous()
    num_blocks, num_spans = work.maxima_MB.shape[1], work.peaks_MS.shape[1]
    _peaks_kernel[(len(lines.rows_MF), num_spans)](
        lines.logits_LV,
        lines.rows_MF,
        work.maxima_MB,
        work.peaks_MS,
        work.peaks_MS if lines.faults_MS is None else lines.faults_MS,
        lines.logits_LV.stride(0),
        lines.logits_LV.shape[1],
        num_blocks,
        num_spans,
        HAS_FAULTS=lines.faults_MS is not None,
    )


@triton.jit
def _peaks_kernel(
    logits,
    rows,
    maxima,
    peaks,
    faults,
    stride,
    num_tokens,
    num_blocks,
    num_spans,
    HAS_FAULTS: tl.constexpr,
):
    """One program for each span of each row: the greatest logit of each block, and of the span."""
    row = tl.program_id(0)
    span = tl.program_id(1)
    line = tl.load(rows + row * FIELDS_PER_ROW + AT_LINE).to(tl.int64)
    blocks = span * _SPAN_BLOCKS + tl.arange(0, _SPAN_BLOCKS)
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_there = tl.where(line >= 0, ids < num_tokens, 0) > 0  # padding of a captured step reads nothing
    x = tl.load(logits + line * stride + ids, mask=is_there, other=-float("inf")).to(tl.float32)
    # What a maximum makes of NaN differs from device to device.
    is_fault = (x != x) | (x == float("inf"))
    x = tl.where(is_fault, -float("inf"), x)
    of_blocks = tl.max(x, axis=1)
    tl.store(maxima + row * num_blocks + blocks, of_blocks, mask=blocks < num_blocks)
    peak = tl.max(of_blocks, axis=0)
    has_fault = tl.max(tl.max(is_fault.to(tl.int32), axis=1), axis=0)
    peak = tl.where(has_fault > 0, float("inf"), peak)
    if HAS_FAULTS:
        peak = tl.maximum(peak, tl.load(faults + row * num_spans + span))
    tl.store(peaks + row * num_spans + span, peak)


@triton.jit
def _peak_of(peaks, row, num_spans, ALL_SPANS: tl.constexpr):
    """Return a finite number if the row can be sampled."""
    spans = tl.arange(0, ALL_SPANS)
    of_spans = tl.load(peaks + row * num_spans + spans, mask=spans < num_spans, other=-float("inf"))
    return tl.max(of_spans, axis=0)


@triton.jit
def _best(line_logits, maxima, peak, num_tokens, num_blocks, ALL_BLOCKS: tl.constexpr):
    """The lowest id with the greatest logit, which is finite."""
    blocks = tl.arange(0, ALL_BLOCKS)
    of_blocks = tl.load(maxima + blocks, mask=blocks < num_blocks, other=-float("inf"))
    block = tl.min(tl.where(of_blocks == peak, blocks, ALL_BLOCKS), axis=0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(line_logits + ids, mask=ids < num_tokens, other=-float("inf")).to(tl.float32)
    return tl.min(tl.where(x == peak, ids, num_tokens), axis=0)


@triton.jit
def _put(outcome, fields, num_places, token, is_sound):
    place = tl.load(fields + AT_PLACE).to(tl.int64)
    tl.store(outcome + place, tl.where(is_sound, token, 0).to(tl.int64))
    tl.store(outcome + num_places + place, tl.where(is_sound, 0, 1).to(tl.int64))


@triton.jit(do_not_specialize=["num_places"])
def _best_kernel(
    logits,
    rows,
    maxima,
    peaks,
    outcome,
    stride,
    num_places,
    num_tokens,
    num_blocks,
    num_spans,
    ALL_BLOCKS: tl.constexpr,
    ALL_SPANS: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0)
    fields = rows + row * FIELDS_PER_ROW
    line_logits = logits + tl.maximum(tl.load(fields + AT_LINE), 0.0).to(tl.int64) * stride
    peak = _peak_of(peaks, row, num_spans, ALL_SPANS)
    is_sound = tl.abs(peak) < float("inf")
    token = _best(line_logits, maxima + row * num_blocks, peak, num_tokens, num_blocks, ALL_BLOCKS)
    _put(outcome, fields, num_places, token, is_sound)


@triton.jit
def _masses(line_logits, fields, ids, peak, num_tokens):
    """Weigh the tokens that min-p keeps; others get 0."""
    x = tl.load(line_logits + ids, mask=ids < num_tokens, other=-float("inf")).to(tl.float32)
    weights = weigh(x, peak, temperature_of(fields))
    return tl.where(bits_of(weights) >= least_bits(fields), mass_of(weights), 0)


@triton.jit
def _sums_kernel(logits, rows, peaks, sums, stride, num_tokens, num_spans, ALL_SPANS: tl.constexpr):
    """One program for each span of each row: the mass that min-p keeps."""
    row = tl.program_id(0)
    span = tl.program_id(1)
    fields = rows + row * FIELDS_PER_ROW
    peak = _peak_of(peaks, row, num_spans, ALL_SPANS)
    # With top-k the mass is that of candidates.
    if (tl.load(fields + AT_TOP_K) == 0) & (tl.abs(peak) < float("inf")):
        line_logits = logits + tl.load(fields + AT_LINE).to(tl.int64) * stride
        masses = _masses(line_logits, fields, span * _SPAN + tl.arange(0, _SPAN), peak, num_tokens)
        tl.store(sums + row * num_spans + span, tl.sum(masses, axis=0))


@triton.jit
def _draw_whole(line_logits, fields, of_spans, spans, peak, num_tokens, num_spans):
    """A token of a row that neither top-k nor top-p truncates: first which span, then which token in it."""
    target = mass_before(fields, tl.sum(of_spans, axis=0))
    span = tl.min(tl.where(tl.cumsum(of_spans, axis=0) > target, spans, num_spans), axis=0)
    before = tl.sum(tl.where(spans < span, of_spans, 0), axis=0)
    ids = span * _SPAN + tl.arange(0, _SPAN)
    cumulated = before + tl.cumsum(_masses(line_logits, fields, ids, peak, num_tokens), axis=0)
    return tl.min(tl.where(cumulated > target, ids, num_tokens), axis=0)


@triton.jit(do_not_specialize=["num_places"])
def _draw_kernel(
    logits,
    rows,
    maxima,
    peaks,
    sums,
    blocks,
    candidates,
    candidate_ids,
    outcome,
    stride,
    num_places,
    num_tokens,
    num_blocks,
    num_spans,
    ALL_BLOCKS: tl.constexpr,
    ALL_SPANS: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0)
    fields = rows + row * FIELDS_PER_ROW
    line_logits = logits + tl.load(fields + AT_LINE).to(tl.int64) * stride
    maxima += row * num_blocks
    peak = _peak_of(peaks, row, num_spans, ALL_SPANS)
    token = tl.full((), 0, tl.int32)
    is_sound = tl.abs(peak) < float("inf")
    if is_sound:
        spans = tl.arange(0, ALL_SPANS)
        of_spans = tl.load(sums + row * num_spans + spans, mask=spans < num_spans, other=0)
        if tl.load(fields + AT_TOP_K) == 1:
            token = _best(line_logits, maxima, peak, num_tokens, num_blocks, ALL_BLOCKS)
        elif (tl.load(fields + AT_TOP_K) == 0) & (tl.load(fields + AT_TOP_P) >= 1.0):
            token = _draw_whole(line_logits, fields, of_spans, spans, peak, num_tokens, num_spans)
        else:
            token = _draw_few(
                line_logits,
                fields,
                maxima,
                peak,
                tl.sum(of_spans, axis=0),
                num_tokens,
                num_blocks,
                blocks + row * num_blocks,
                candidates + row * CAPACITY,
                candidate_ids + row * CAPACITY,
                ALL_BLOCKS,
            )
    _put(outcome, fields, num_places, token, is_sound)


@triton.jit
def _draw_few(
    line_logits,
    fields,
    maxima,
    peak,
    total,
    num_tokens,
    num_blocks,
    blocks,
    candidates,
    candidate_ids,
    ALL_BLOCKS: tl.constexpr,
):
    """A token of a row that top-k or top-p truncates; the total is of a row without top-k."""
    temperature = temperature_of(fields)
    num, bound = list_candidates(
        line_logits,
        maxima,
        peak,
        temperature,
        num_tokens,
        num_blocks,
        blocks,
        candidates,
        candidate_ids,
        ALL_BLOCKS,
    )
    token = tl.full((), 0, tl.int32)
    is_exact = num <= CAPACITY
    if is_exact:
        place, least = draw_truncated(
            candidates, num, fields, peak, total, candidates, candidate_ids, IS_ROW=False
        )
        # Whatever is no candidate weighs as much as the bound, at most.
        bound_bits = bits_of(weigh(bound, peak, temperature))
        is_exact = (least > bound_bits) | (least_bits(fields) > bound_bits)
        # Otherwise the mass may be more than all candidates have.
        token = tl.load(candidate_ids + tl.minimum(place, num - 1))
    if is_exact == 0:
        tl.debug_barrier()
        token, least = draw_truncated(
            line_logits, num_tokens, fields, peak, total, candidates, candidate_ids, IS_ROW=True
        )
    return token
