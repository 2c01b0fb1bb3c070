"""Products of up to 16 rows on a GPU, with the norm before them and the gates or the addition behind them.

Owns: the kernel, its tiles and its launch. A product of so few rows is as long as reading its weight: each
weight is read once, in the order in which it lies, by as many programs as keep the memory busy.
Source: split-K products (Stream-K, arXiv:2301.03598); RMSNorm, arXiv:1910.07467; SwiGLU, arXiv:2002.05202.

The scale of a row's norm is a factor of its sums. Each program adds up the squares of all rows on its way, as
a product of the rows with themselves, and multiplies its sums at the end: nothing waits for a norm.

A product of few outputs is divided by its inputs as well. Each program leaves its part then, and the last to
arrive adds them up, always in the same order.

Shapes: T rows, N outputs of a program, K inputs of a step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.devices.dependent_launch import launch_way, wait_first
from worker.devices.last_arrival import is_last_arrival
from worker.gpu.kernels.activation import gated
from worker.model.layer_parts import GateActivation, RmsNorm

MOST_ROWS = 16
"""A tensor core's tile has as many at least."""
_WIDE_OUTPUTS, _NARROW_OUTPUTS = 32, 16
# 16 KiB of a weight in a step, of which four are on their way. A norm and gates want registers: fewer inputs,
# and more steps on their way instead.
_STEP_NUMBERS = 8192
_FLOAT32_STEP_NUMBERS = 1024
_MOST_FOLDED_INPUTS = 128
_NUM_STAGES, _NUM_FOLDED_STAGES = 4, 5
_NUM_WARPS, _NUM_FOLDED_WARPS = 4, 8
_LEAST_STEPS = 2
"""Fewest steps of a program, where a product is divided by its inputs."""


class SkinnyTiles(NamedTuple):
    """The work of one program, and the number of programs that share its outputs."""

    outputs: int
    inputs: int
    splits: int


class Folds(NamedTuple):
    """The work before and behind the product."""

    norm: RmsNorm | None = None
    """The norm of the rows that are multiplied; its weight in float32, or in the rows' own dtype."""
    activation: GateActivation = GateActivation.NONE
    """With one, the first half of the outputs are gates, and the others are multiplied by them."""
    is_added: bool = False
    """The product, times `multiplier`, is added to what stands there."""
    multiplier: float = 1.0

    @property
    def needs_whole_rows(self) -> bool:
        """Whether a program has to see all inputs: squares of a row, or sums that a gate's function takes."""
        return self.norm is not None or self.activation is not GateActivation.NONE


def choose_skinny_tiles(weight_NK: Tensor, folds: Folds, num_processors: int) -> SkinnyTiles:
    """Choose tiles such that each processor has a program, where there is so much work."""
    num_outputs, num_inputs = weight_NK.shape
    if folds.activation is not GateActivation.NONE:
        num_outputs //= 2
    # Wide tiles want a program for each processor; half as many will do where warps would share narrow ones.
    enough = num_processors // 2 if folds.needs_whole_rows else num_processors
    outputs = _NARROW_OUTPUTS if num_outputs <= _WIDE_OUTPUTS * enough else _WIDE_OUTPUTS
    step_numbers = _FLOAT32_STEP_NUMBERS if weight_NK.dtype == torch.float32 else _STEP_NUMBERS
    inputs = max(MOST_ROWS, min(step_numbers // outputs, triton.next_power_of_2(num_inputs)))
    if folds.needs_whole_rows:
        return SkinnyTiles(outputs, min(inputs, _MOST_FOLDED_INPUTS), 1)
    num_steps = triton.cdiv(num_inputs, inputs)
    wanted = triton.cdiv(num_processors, triton.cdiv(num_outputs, outputs))
    return SkinnyTiles(outputs, inputs, max(1, min(wanted, num_steps // _LEAST_STEPS)))


def multiply_skinny(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    folds: Folds,
    tiles: SkinnyTiles,
    *,
    out_TN: Tensor | None = None,
    arrivals: Tensor,
) -> Tensor:
    """Return the product [T, N], or [T, N / 2] behind gates, for up to 16 contiguous rows.

    With `is_added` it goes to out_TN, which must be given then. `arrivals` are zero int32 counters, one for
    each program's outputs, and are zero again when the launch ends.
    """
    num_rows, num_inputs = x_TK.shape
    num_outputs = weight_NK.shape[0]
    is_gated = folds.activation is not GateActivation.NONE
    is_folded = folds.needs_whole_rows
    if is_gated:
        num_outputs //= 2
    if out_TN is None:
        out_TN = x_TK.new_empty((num_rows, num_outputs))
    num_tiles = triton.cdiv(num_outputs, tiles.outputs)
    parts = None
    if tiles.splits > 1:
        # In a captured graph this is its own memory, which layers use one after another.
        parts = x_TK.new_empty((num_tiles * tiles.splits, MOST_ROWS, tiles.outputs), dtype=torch.float32)
    skinny_kernel[(num_tiles, tiles.splits)](
        x_TK, weight_NK, out_TN, bias_N, None if folds.norm is None else folds.norm.weight_H, parts, arrivals,
        num_rows, num_outputs, num_inputs, 0.0 if folds.norm is None else folds.norm.epsilon,
        folds.multiplier,
        ACTIVATION=int(folds.activation), ADDS=folds.is_added, SPLITS=tiles.splits,
        ROWS=MOST_ROWS, OUTPUTS=tiles.outputs, INPUTS=tiles.inputs,
        HAS_WHOLE_STEPS=num_inputs % tiles.inputs == 0,
        num_warps=_NUM_FOLDED_WARPS if is_folded else _NUM_WARPS,
        num_stages=_NUM_FOLDED_STAGES if is_folded else _NUM_STAGES,
        **launch_way(),
    )  # fmt: skip
    return out_TN


@triton.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    x, weight, out, bias, norm_weight, parts, arrivals,
    num_rows, num_outputs, num_inputs, epsilon, multiplier,
    ACTIVATION: tl.constexpr, ADDS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HAS_WHOLE_STEPS: tl.constexpr,
    WAITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some outputs of all rows, or its part of their sums."""
    wait_first(WAITS)
    tile = tl.program_id(0)
    outputs_N = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows_T = tl.arange(0, ROWS)
    steps_each = tl.cdiv(tl.cdiv(num_inputs, INPUTS), SPLITS)
    first = tl.program_id(1) * steps_each
    sums_TN, ups_TN, squares_T = _multiply_steps(
        x, weight, norm_weight, rows_T, outputs_N, num_rows, num_outputs, num_inputs,
        first, tl.minimum(first + steps_each, tl.cdiv(num_inputs, INPUTS)),
        ACTIVATION, ROWS, OUTPUTS, INPUTS, HAS_WHOLE_STEPS,
    )  # fmt: skip
    if norm_weight is not None:
        scale_T1 = tl.rsqrt(squares_T / num_inputs + epsilon)[:, None]
        sums_TN = sums_TN * scale_T1
        ups_TN = ups_TN * scale_T1
    if ACTIVATION > 0:
        sums_TN = gated(sums_TN, ups_TN, ACTIVATION)
    if SPLITS == 1:
        _finish(out, bias, sums_TN, rows_T, outputs_N, num_rows, num_outputs, multiplier, ADDS)
    else:
        places_TN = rows_T[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        part = parts + (tile * SPLITS + tl.program_id(1)).to(tl.int64) * (ROWS * OUTPUTS)
        tl.store(part + places_TN, sums_TN)
        if is_last_arrival(arrivals + tile, SPLITS):
            sums_TN = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
            for split in range(SPLITS):
                part = parts + (tile * SPLITS + split).to(tl.int64) * (ROWS * OUTPUTS)
                # Others have written them: not to be read from the cache of this processor.
                sums_TN += tl.load(part + places_TN, cache_modifier=".cg")
            _finish(out, bias, sums_TN, rows_T, outputs_N, num_rows, num_outputs, multiplier, ADDS)


@triton.jit
def _multiply_steps(
    x, weight, norm_weight, rows_T, outputs_N, num_rows, num_outputs, num_inputs, first, end,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    HAS_WHOLE_STEPS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Go through some steps of the inputs; returns the sums of outputs, of ups, and rows' squares."""
    sums_TN = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    ups_TN = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    squares_TT = tl.zeros([ROWS, ROWS], dtype=tl.float32)
    x_T = x + rows_T * num_inputs
    weight_N = weight + outputs_N.to(tl.int64) * num_inputs
    up_N = weight_N + num_outputs.to(tl.int64) * num_inputs
    for step in range(first, end):
        inputs_K = step * INPUTS + tl.arange(0, INPUTS)
        is_row_TK = (rows_T < num_rows)[:, None]
        is_there_NK = (outputs_N < num_outputs)[:, None]
        if not HAS_WHOLE_STEPS:
            is_row_TK = is_row_TK & (inputs_K < num_inputs)[None, :]
            is_there_NK = is_there_NK & (inputs_K < num_inputs)[None, :]
        weight_NK = tl.load(weight_N[:, None] + inputs_K[None, :], mask=is_there_NK, other=0.0)
        x_TK = tl.load(x_T[:, None] + inputs_K[None, :], mask=is_row_TK, other=0.0)
        if norm_weight is not None:
            # Each program does this for all rows, so it has to be little: no number is widened.
            squares_TT = tl.dot(x_TK, tl.trans(x_TK), squares_TT, input_precision="ieee")
            scale_K = tl.load(norm_weight + inputs_K, mask=inputs_K < num_inputs, other=0.0)
            x_TK = (x_TK * scale_K[None, :]).to(x_TK.dtype)
        sums_TN = tl.dot(x_TK, tl.trans(weight_NK), sums_TN, input_precision="ieee")
        if ACTIVATION > 0:
            weight_NK = tl.load(up_N[:, None] + inputs_K[None, :], mask=is_there_NK, other=0.0)
            ups_TN = tl.dot(x_TK, tl.trans(weight_NK), ups_TN, input_precision="ieee")
    squares_T = tl.sum(tl.where(rows_T[:, None] == rows_T[None, :], squares_TT, 0.0), axis=1)
    return sums_TN, ups_TN, squares_T


@triton.jit
def _finish(
    out, bias, sums_TN, rows_T, outputs_N, num_rows, num_outputs, multiplier, ADDS: tl.constexpr
) -> None:
    """Store the sums with their bias, or add them to what stands there."""
    is_there_TN = (rows_T < num_rows)[:, None] & (outputs_N < num_outputs)[None, :]
    if bias is not None:
        bias_N = tl.load(bias + outputs_N, mask=outputs_N < num_outputs, other=0.0)
        sums_TN += bias_N.to(tl.float32)[None, :]
    out_TN = out + rows_T.to(tl.int64)[:, None] * num_outputs + outputs_N[None, :]
    if ADDS:
        before_TN = tl.load(out_TN, mask=is_there_TN, other=0.0).to(tl.float32)
        sums_TN = before_TN + sums_TN * multiplier
    tl.store(out_TN, sums_TN.to(out.dtype.element_ty), mask=is_there_TN)
