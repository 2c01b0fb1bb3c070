"""Trials at load share these: the error of one result against another, and the text of a failure.

Owns: how far results may differ that are rounded in another order.
Never: computes, or decides what is taken.
"""

import torch
from torch import Tensor

ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Relative error of one rounding more or less."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the size of the difference over the size of `expected`; infinite where a number is NaN."""
    size = expected.norm().clamp_min(torch.finfo(expected.dtype).tiny)
    return float(((found - expected).norm() / size).nan_to_num(torch.inf))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
