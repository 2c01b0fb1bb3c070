"""Penalties on the tokens that occur in a sequence, and how often each was generated, without the host.

Owns: the arithmetic, bit for bit that of worker/sampling/logits.py, and the format of the counts.
Source: as worker/sampling/logits.py names it.

A count is one int32 for each token of the vocabulary: twice how often it was generated, and 1 more if the
prompt has it. 0 is no token of the sequence, and is let alone.

Shapes: E lines, V vocabulary, C rows of the worker, N positions.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_LINE_BLOCK = 256
IN_PROMPT = 1
GENERATED_ONCE = 2


class Penalties(NamedTuple):
    """Penalties of some lines of logits."""

    rows_E: Tensor
    """int32: whose counts these are; -1 for a line without penalties."""
    amounts_E3: Tensor
    """float64: repetition, frequency and presence penalty."""
    counts_CV: Tensor
    """int32."""


def penalize(logits_EV: Tensor, penalties: Penalties) -> None:
    """Apply to float32 logits, in place."""
    num_lines, vocab_size = logits_EV.shape
    _penalize_kernel[(num_lines, triton.cdiv(vocab_size, _BLOCK))](
        logits_EV, *penalties, logits_EV.stride(0), vocab_size, BLOCK=_BLOCK
    )


def count_tokens(counts_CV: Tensor, rows_E: Tensor, places_E: Tensor, outcome_2N: Tensor) -> None:
    """Count the tokens at `places_E` of an outcome, but for failed rows.

    Both are int32; the rows are distinct, but for -1. outcome_2N is int64: tokens, then whether they failed.
    """
    num_lines, num_places, vocab_size = len(rows_E), outcome_2N.shape[1], counts_CV.shape[1]
    _count_kernel[(triton.cdiv(num_lines, _LINE_BLOCK),)](
        counts_CV, rows_E, places_E, outcome_2N, num_lines, num_places, vocab_size, BLOCK=_LINE_BLOCK
    )


@triton.jit
def _penalize_kernel(logits, rows, amounts, counts, stride, num_tokens, BLOCK: tl.constexpr):
    """One program for BLOCK tokens of a line."""
    place = tl.program_id(0)
    row = tl.load(rows + place).to(tl.int64)
    repetition = tl.load(amounts + place * 3).to(tl.float32)
    frequency = tl.load(amounts + place * 3 + 1).to(tl.float32)
    presence = tl.load(amounts + place * 3 + 2)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_counted = tl.where(row >= 0, ids < num_tokens, 0) > 0
    words = tl.load(counts + row * num_tokens + ids, mask=is_counted, other=0)
    occurs = words > 0
    count = (words >> 1).to(tl.float32)
    x_at = logits + place.to(tl.int64) * stride + ids
    x = tl.load(x_at, mask=occurs, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    # In float64, as NumPy adds a Python float to an array of truths; that also keeps the product apart.
    subtracted = (frequency * count).to(tl.float64) + presence * (count > 0).to(tl.float64)
    tl.store(x_at, x - subtracted.to(tl.float32), mask=occurs)


@triton.jit(do_not_specialize=["num_lines", "num_places"])
def _count_kernel(counts, rows, places, outcome, num_lines, num_places, num_tokens, BLOCK: tl.constexpr):
    """One program for BLOCK lines."""
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + lines, mask=lines < num_lines, other=-1).to(tl.int64)
    is_counted = row >= 0
    place = tl.load(places + lines, mask=is_counted, other=0)
    token = tl.load(outcome + place, mask=is_counted, other=0)
    is_counted &= tl.load(outcome + num_places + place, mask=is_counted, other=1) == 0
    count_at = counts + row * num_tokens + token
    tl.store(count_at, tl.load(count_at, mask=is_counted, other=0) + 2, mask=is_counted)
