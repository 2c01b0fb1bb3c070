"""Logits in float32, to be edited, without the tokens that a bitmask forbids.

Owns: the one pass that converts, masks and finds numbers that are not finite: an edit may hide them.

Shapes: N positions, E lines to be edited, V vocabulary, G masks, K words of a mask, S spans of SPAN.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.gpu.sampling_kernels.token_draw import SPAN


def copy_masked(
    logits_NV: Tensor, lines_E2: Tensor, masks_GK: Tensor | None, edited_EV: Tensor, faults_ES: Tensor
) -> None:
    """Fill in edited_EV, and faults_ES with +inf where a span holds a NaN or +inf, otherwise -inf.

    lines_E2 is int32: which line of the logits, and which mask, or -1 for none. Masks are int32, one bit for
    each token, the lowest of a word first, 1 is allowed; tokens behind their end are not.
    """
    num_lines, num_spans = faults_ES.shape
    _copy_kernel[(num_lines, num_spans)](
        logits_NV,
        lines_E2,
        lines_E2 if masks_GK is None else masks_GK,
        edited_EV,
        faults_ES,
        logits_NV.stride(0),
        edited_EV.stride(0),
        logits_NV.shape[1],
        0 if masks_GK is None else masks_GK.shape[1],
        num_spans,
        HAS_MASKS=masks_GK is not None,
        SPAN=SPAN,
    )


@triton.jit
def _copy_kernel(
    logits,
    lines,
    masks,
    edited,
    faults,
    stride,
    edited_stride,
    num_tokens,
    num_words,
    num_spans,
    HAS_MASKS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """One program for each span of each line."""
    place = tl.program_id(0)
    span = tl.program_id(1)
    line = tl.load(lines + place * 2).to(tl.int64)
    ids = span * SPAN + tl.arange(0, SPAN)
    x = tl.load(logits + line * stride + ids, mask=ids < num_tokens, other=-float("inf")).to(tl.float32)
    is_fault = (x != x) | (x == float("inf"))
    has_fault = tl.max(is_fault.to(tl.int32), axis=0)
    tl.store(faults + place * num_spans + span, tl.where(has_fault > 0, float("inf"), -float("inf")))
    if HAS_MASKS:
        mask = tl.load(lines + place * 2 + 1).to(tl.int64)
        if mask >= 0:
            words = ids // 32
            word = tl.load(masks + mask * num_words + words, mask=words < num_words, other=0)
            x = tl.where(((word >> (ids % 32)) & 1) == 1, x, -float("inf"))
    tl.store(edited + place.to(tl.int64) * edited_stride + ids, x, mask=ids < num_tokens)
