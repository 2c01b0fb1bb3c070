"""Penalties on the tokens that occur in a sequence, and on no others.

Owns: the arithmetic, bit for bit that of worker/logits.py.
Never: counts tokens (worker/sampling_state.py).
Source: as worker/logits.py names it.

Shapes: E lines, V vocabulary, P lines with penalties, L listed tokens of all of them.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


class Penalties(NamedTuple):
    """What is to be done to whom."""

    lines_P: Tensor
    """int32: where in the logits."""
    starts_P: Tensor
    """[P + 1] int32: the listed tokens of p are starts[p] to starts[p + 1]."""
    amounts_P3: Tensor
    """float64: repetition, frequency and presence penalty."""
    ids_L: Tensor
    """int32: each token of prompt and output, once a line."""
    counts_L: Tensor
    """float32: how often it was generated."""


def penalize(logits_EV: Tensor, penalties: Penalties, *, most_listed: int) -> None:
    """Apply to float32 logits, in place. No line lists more than `most_listed` tokens."""
    _penalize_kernel[(len(penalties.lines_P), triton.cdiv(most_listed, _BLOCK))](
        logits_EV, *penalties, logits_EV.stride(0), BLOCK=_BLOCK
    )


@triton.jit
def _penalize_kernel(logits, lines, starts, amounts, listed, counts, stride, BLOCK: tl.constexpr):
    """One program for BLOCK listed tokens of a line."""
    place = tl.program_id(0)
    start = tl.load(starts + place)
    end = tl.load(starts + place + 1)
    repetition = tl.load(amounts + place * 3).to(tl.float32)
    frequency = tl.load(amounts + place * 3 + 1).to(tl.float32)
    presence = tl.load(amounts + place * 3 + 2)
    places = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < end
    ids = tl.load(listed + places, mask=is_there, other=0)
    count = tl.load(counts + places, mask=is_there, other=0.0)
    x_at = logits + tl.load(lines + place).to(tl.int64) * stride + ids
    x = tl.load(x_at, mask=is_there, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    # In float64, as NumPy adds a Python float to an array of truths; that also keeps the product apart.
    subtracted = (frequency * count).to(tl.float64) + presence * (count > 0).to(tl.float64)
    tl.store(x_at, x - subtracted.to(tl.float32), mask=is_there)
