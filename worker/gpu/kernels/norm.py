"""Root-mean-square norms on a GPU, with the addition to the residual that often stands before them.

One program per token holds the whole row in registers.
Source: RMSNorm, arXiv:1910.07467.

The sum that is normed is the one that was stored: rounded to the residual's dtype, as a model by itself
rounds it. All other arithmetic is float32.

Shapes: T tokens, H numbers of a hidden state.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.devices.dependent_launch import begin, launch_way, warm_way
from worker.model.layer_parts import RmsNorm

LARGEST_ROW = 16384
"""Numbers of a hidden state; more would not fit into the registers of a program."""


@triton.jit
def _norm_kernel(
    hidden_ptr,
    delta_ptr,
    normed_ptr,
    delta_weight_ptr,
    weight_ptr,
    num_numbers,
    delta_epsilon,
    epsilon,
    HAS_DELTA: tl.constexpr,
    NORMS_DELTA: tl.constexpr,
    NORMS_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    warmed_ptr,
    warmed_bytes,
    WARMERS: tl.constexpr,
    WAITS: tl.constexpr,
):
    program = begin(warmed_ptr, warmed_bytes, WAITS, WARMERS)
    if WARMERS > 0:  # noqa: SIM102 - the compiler decides this one
        if program < 0:
            return
    row = program.to(tl.int64) * num_numbers
    numbers = tl.arange(0, BLOCK)
    mask = numbers < num_numbers
    x = tl.load(hidden_ptr + row + numbers, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row + numbers, mask=mask, other=0.0).to(tl.float32)
        if NORMS_DELTA:
            weight = tl.load(delta_weight_ptr + numbers, mask=mask, other=0.0)
            delta = delta * tl.rsqrt(tl.sum(delta * delta, axis=0) / num_numbers + delta_epsilon) * weight
        rounded = (x + delta).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row + numbers, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if NORMS_SUM:
        weight = tl.load(weight_ptr + numbers, mask=mask, other=0.0)
        normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / num_numbers + epsilon) * weight
        tl.store(normed_ptr + row + numbers, normed.to(normed_ptr.dtype.element_ty), mask=mask)


def norm(hidden_TH: Tensor, by: RmsNorm) -> Tensor:
    """Return the normed rows, as torch.nn.functional.rms_norm does; hidden_TH is contiguous."""
    normed_TH = hidden_TH.new_empty(hidden_TH.shape)
    _launch(hidden_TH, None, normed_TH, None, by)
    return normed_TH


def add(hidden_TH: Tensor, delta_TH: Tensor, delta_norm: RmsNorm | None) -> None:
    """Add delta_TH, normed if a norm is given, to hidden_TH in place; both contiguous."""
    _launch(hidden_TH, delta_TH, None, delta_norm, None)


def add_and_norm(hidden_TH: Tensor, delta_TH: Tensor, delta_norm: RmsNorm | None, by: RmsNorm) -> Tensor:
    """Add as `add` does, and return the normed sum."""
    normed_TH = hidden_TH.new_empty(hidden_TH.shape)
    _launch(hidden_TH, delta_TH, normed_TH, delta_norm, by)
    return normed_TH


def _launch(
    hidden_TH: Tensor,
    delta_TH: Tensor | None,
    normed_TH: Tensor | None,
    delta_norm: RmsNorm | None,
    sum_norm: RmsNorm | None,
) -> None:
    num_tokens, num_numbers = hidden_TH.shape
    block = triton.next_power_of_2(num_numbers)
    warmed = warm_way()
    _norm_kernel[(num_tokens + warmed["WARMERS"],)](
        hidden_TH,
        delta_TH,
        normed_TH,
        None if delta_norm is None else delta_norm.weight_H,
        None if sum_norm is None else sum_norm.weight_H,
        num_numbers,
        0.0 if delta_norm is None else delta_norm.epsilon,
        0.0 if sum_norm is None else sum_norm.epsilon,
        HAS_DELTA=delta_TH is not None,
        NORMS_DELTA=delta_norm is not None,
        NORMS_SUM=sum_norm is not None,
        BLOCK=block,
        num_warps=_warps_for_row(block),
        **warmed,
        **launch_way(),
    )


def _warps_for_row(block: int) -> int:
    """16 numbers per thread where rows are long enough: two loads of 16 bytes each in bfloat16."""
    return min(max(block // (32 * 16), 1), 16)
