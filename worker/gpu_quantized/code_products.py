"""Linear layers of codes in the form in which a GPU multiplies by them.

Owns: the order of codes in memory, the choice of tiles, and how many programs share a product.
Never: decoding (code_kernels.py), or where in a layer a product stands.

Shapes: T tokens, N outputs, K inputs, G groups of inputs, B bytes of a row, E experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear as linear_of_torch
from torch.nn.functional import pad

from worker.gpu_quantized.kernels.code_kernels import (
    FLOAT8,
    INT8,
    NIBBLES_BY_TABLE,
    NIBBLES_E2M1,
    NIBBLES_IN_ORDER,
    add_parts_kernel,
    multiply_codes_kernel,
    write_numbers_kernel,
)
from worker.model.linear import Linear, PlainWeight, Weight
from worker.model.quantization import Int8Weight
from worker.quantized.grouped_weight import E2M1_TABLE, UNSIGNED_TABLE, GroupedWeight, pack_nibbles

_SMALLEST_SIDE = 16
"""A tensor core's tile has no smaller side."""
_MOST_NIBBLE_INPUTS, _MOST_BYTE_INPUTS = 64, 128
_PROGRAMS = 480
"""Programs that keep a large GPU busy, measured on one of 132 processors."""
_FEWEST_TILES_OF_A_SPLIT = 4
_ADDED_AT_ONCE = 1024
_WRITTEN_OUTPUTS = 32


class CodeTiles(NamedTuple):
    """The part of a product that one program takes: measured on an H200 for 16 and 64 rows, or estimated."""

    tokens: int
    outputs: int
    num_warps: int
    num_stages: int


_TILES_OF_NIBBLES = (
    CodeTiles(tokens=16, outputs=128, num_warps=4, num_stages=4),
    CodeTiles(tokens=32, outputs=128, num_warps=4, num_stages=4),
    CodeTiles(tokens=64, outputs=128, num_warps=8, num_stages=3),
    CodeTiles(tokens=128, outputs=128, num_warps=8, num_stages=3),
)
_TILES_OF_BYTES = (
    CodeTiles(tokens=16, outputs=64, num_warps=4, num_stages=4),
    CodeTiles(tokens=32, outputs=64, num_warps=4, num_stages=4),
    CodeTiles(tokens=64, outputs=64, num_warps=4, num_stages=3),
    CodeTiles(tokens=128, outputs=128, num_warps=8, num_stages=3),
)
_WIDE_ITEM_TILES = CodeTiles(tokens=16, outputs=32, num_warps=4, num_stages=1)
"""Tiles of float32, which has no tensor cores here: it is for trials."""


class Route(NamedTuple):
    """The order of a router's pairs by their experts, as gpu/kernels/expert_products.py makes it."""

    pairs_P: Tensor
    expert_of_tile: Tensor
    start_of_tile: Tensor
    end_of_tile: Tensor


class Call(NamedTuple):
    """Further arguments of a product."""

    bias: Tensor | None = None
    parts: Tensor | None = None
    """float32 [splits, T, N], where several programs share the inputs of one product."""
    multiplier: float | None = None
    """A factor of what is added to the target; without one, the target is overwritten."""
    route: Route | None = None
    """Rows of several weights, each to be multiplied by one of them."""
    num_chosen: int = 0
    """With a route: of how many pairs each row of input is one; 0 where input has a row for each pair."""


def choose_tiles(num_tokens: int, dtype: torch.dtype, weights: "CodeWeights") -> CodeTiles:
    """Choose the tiles of a product of so many rows of one weight."""
    if dtype is torch.float32:
        return _WIDE_ITEM_TILES
    tiles = _TILES_OF_NIBBLES if weights.is_nibbles else _TILES_OF_BYTES
    return next((each for each in tiles if num_tokens <= each.tokens), tiles[-1])


def find_hindrance(weight: Weight) -> str | None:
    """Say why there is no product by this weight; None where there is one."""
    if not isinstance(weight, GroupedWeight | Int8Weight):
        return None
    weight = grouped(weight)
    if weight.group_size % _SMALLEST_SIDE:
        return f"groups of {weight.group_size} inputs are no multiple of {_SMALLEST_SIDE}"
    if weight.table is not None and not torch.equal(weight.table.bfloat16().float(), weight.table.float()):
        return "the table has numbers that bfloat16 has not"
    return None


class CodeWeights:
    """One weight, or those of several experts, in the order of the kernels.

    Bytes of nibbles are tiles of two ranges of inputs: the lower code is of the first range.
    """

    def __init__(self, weights: Sequence[GroupedWeight]) -> None:
        first = weights[0]
        is_nibbles = first.codes.dtype is torch.uint8
        self.num_outputs, self.num_inputs = first.shape
        self.group_size = 0 if first.scales_NG.shape[1] == 1 else first.group_size
        self.inputs = _inputs_of_a_range(
            first.group_size, _MOST_NIBBLE_INPUTS if is_nibbles else _MOST_BYTE_INPUTS
        )
        self.num_tiles = -(-self.num_inputs // (self.inputs * (2 if is_nibbles else 1)))
        self.codes_EB = torch.stack([self._in_tiles(each) for each in weights])
        self.is_nibbles = is_nibbles
        self.kind, self.first, self.table = _kind_of(first)
        self.scales_EGN = _smallest(torch.stack([each.scales_NG.T for each in weights]))
        self.offsets_EGN: Tensor | None = None
        if first.offsets_NG is not None:
            offsets = [each.offsets_NG for each in weights]
            self.offsets_EGN = _smallest(torch.stack([each.T for each in offsets if each is not None]))
        self.permutation_K = first.permutation_K

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Write the numbers [N, K] of the one weight, in the order of its codes."""
        numbers_NK = torch.empty(
            (self.num_outputs, self.num_inputs), dtype=dtype, device=self.codes_EB.device
        )
        write_numbers_kernel[(self.num_tiles, triton.cdiv(self.num_outputs, _WRITTEN_OUTPUTS))](
            self.codes_EB, self.table, self.scales_EGN, self.offsets_EGN, numbers_NK,
            self.num_outputs, self.num_inputs, self.scales_EGN.shape[1], self.codes_EB.shape[-1],
            CODES=self.kind, FIRST=self.first, GROUP=self.group_size, OUTPUTS=_WRITTEN_OUTPUTS,
            INPUTS=self.inputs, num_warps=4,
        )  # fmt: skip
        return numbers_NK

    def ordered(self, x_TK: Tensor) -> Tensor:
        """Bring inputs into the order of the codes."""
        return x_TK if self.permutation_K is None else x_TK[:, self.permutation_K]

    def _in_tiles(self, weight: GroupedWeight) -> Tensor:
        if weight.codes.dtype is not torch.uint8:
            return weight.codes.view(torch.uint8).contiguous()
        nibbles = weight.nibbles()
        nibbles = pad(nibbles, (0, -nibbles.shape[1] % (2 * self.inputs)))
        ranges = nibbles.view(len(nibbles), -1, 2, self.inputs).transpose(2, 3)
        return pack_nibbles(ranges.reshape(len(nibbles), -1))


def _inputs_of_a_range(group_size: int, most: int) -> int:
    """Find the largest power of two that divides a group."""
    return min(group_size & -group_size, most)


def _kind_of(weight: GroupedWeight) -> tuple[int, int, Tensor | None]:
    """Return CODES, FIRST and a table, if numbers are looked up."""
    if weight.table is None:
        return (INT8 if weight.codes.dtype is torch.int8 else FLOAT8), 0, None
    table = weight.table.float().cpu()
    first = int(table[0]) if bool(table[0].isfinite()) else 0
    if torch.equal(table - first, UNSIGNED_TABLE):
        return NIBBLES_IN_ORDER, first, None
    if torch.equal(table, E2M1_TABLE):
        return NIBBLES_E2M1, 0, None
    return NIBBLES_BY_TABLE, 0, weight.table.float()


def _smallest(numbers: Tensor) -> Tensor:
    """Keep numbers in two bytes where that holds them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        rounded = numbers.to(dtype)
        if torch.equal(rounded.float(), numbers):
            return rounded.contiguous()
    return numbers.float().contiguous()


def grouped(weight: Weight) -> GroupedWeight:
    """Return the codes of a weight of any format that this folder multiplies by."""
    if isinstance(weight, Int8Weight):
        return GroupedWeight(codes=weight.codes_NK, scales_NG=weight.scales_N[:, None])
    assert isinstance(weight, GroupedWeight)
    return weight


def without_codes(linear: Linear) -> Linear:
    """Forget codes, which their product has in an order of its own; sizes stay."""
    if not isinstance(linear.weight, GroupedWeight | Int8Weight):
        return linear
    one = torch.zeros((1, 1), dtype=torch.bfloat16, device=linear.weight.device)
    return replace(linear, weight=PlainWeight(one.expand(linear.weight.shape)))


class CodeProduct:
    """The product of a linear layer of codes. See Product (gpu/gpu_products.py)."""

    def __init__(self, linear: Linear) -> None:
        self._weights = CodeWeights([grouped(linear.weight)])
        self._bias_N = linear.bias_N
        self.num_outputs, self.num_inputs = linear.num_outputs, linear.num_inputs
        self._described = f"{self.num_outputs} x {self.num_inputs} in {grouped(linear.weight).kind}"
        self.fewest_by_numbers: int | None = None
        """Rows from which on the codes' numbers are written, rounded to the rows' dtype, and multiplied by
        cuBLAS. None: never."""

    @property
    def has_bias(self) -> bool:
        return self._bias_N is not None

    def describe(self) -> str:
        """Name sizes and format for a person; products that are named alike take about the same time."""
        return self._described

    @property
    def float8_codes(self) -> Tensor:
        """Codes as float8_e4m3fn [N, K], where they are such."""
        return self._weights.codes_EB[0].view(torch.float8_e4m3fn)

    def multiply(self, x_TK: Tensor) -> Tensor:
        """Return [T, N], with the bias."""
        return self.multiply_to(x_TK, x_TK.dtype)

    def multiply_to(self, x_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, N] in another dtype, which its float32 sums are rounded to once."""
        if dtype is x_TK.dtype and self._multiplies_numbers(x_TK):
            return self.multiply_by_numbers(x_TK)
        out_TN = torch.empty((len(x_TK), self.num_outputs), dtype=dtype, device=x_TK.device)
        self._launch(x_TK, out_TN, None)
        return out_TN

    def multiply_by_numbers(self, x_TK: Tensor) -> Tensor:
        """Return [T, N], with the bias, by numbers in the dtype of the rows."""
        weights = self._weights
        return linear_of_torch(weights.ordered(x_TK), weights.numbers(x_TK.dtype), self._bias_N)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Write the numbers [N, K] that the codes stand for, in the order of the inputs."""
        numbers_NK, permutation_K = self._weights.numbers(dtype), self._weights.permutation_K
        if permutation_K is None:
            return numbers_NK
        ordered_NK = torch.empty_like(numbers_NK)
        ordered_NK[:, permutation_K] = numbers_NK
        return ordered_NK

    def _multiplies_numbers(self, x_TK: Tensor) -> bool:
        fewest = self.fewest_by_numbers
        return fewest is not None and len(x_TK) >= fewest and x_TK.dtype is not torch.float32

    def multiply_and_add(self, residual_TN: Tensor, x_TK: Tensor, multiplier: float) -> None:
        """Add the product, times `multiplier`, to the residual in place."""
        if self._bias_N is not None:
            residual_TN.add_(self.multiply(x_TK), alpha=multiplier)
        elif self._multiplies_numbers(x_TK):
            numbers_NK = self._weights.numbers(x_TK.dtype)
            residual_TN.addmm_(self._weights.ordered(x_TK), numbers_NK.t(), alpha=multiplier)
        else:
            self._launch(x_TK, residual_TN, multiplier)

    def _launch(self, x_TK: Tensor, target_TN: Tensor, multiplier: float | None) -> None:
        weights = self._weights
        tiles = choose_tiles(len(x_TK), x_TK.dtype, weights)
        grid = (triton.cdiv(self.num_outputs, tiles.outputs), triton.cdiv(len(x_TK), tiles.tokens))
        num_splits = count_splits(grid[0] * grid[1], weights.num_tiles)
        parts = None
        if num_splits > 1:
            shape = (num_splits, *target_TN.shape)
            parts = torch.empty(shape, dtype=torch.float32, device=x_TK.device)
        call = Call(self._bias_N, parts, multiplier)
        launch((*grid, num_splits), x_TK, weights, target_TN, tiles, call)
        if parts is not None:
            add_parts_kernel[(triton.cdiv(target_TN.numel(), _ADDED_AT_ONCE),)](
                parts, self._bias_N, target_TN, target_TN.numel(), self.num_outputs, num_splits,
                multiplier or 0.0, ADDS=multiplier is not None, BLOCK=_ADDED_AT_ONCE, num_warps=4,
            )  # fmt: skip


def count_splits(num_programs: int, num_tiles: int) -> int:
    """Divide the inputs among so many programs that a GPU is busy, each with some tiles at least."""
    wanted = min(_PROGRAMS // num_programs, num_tiles // _FEWEST_TILES_OF_A_SPLIT)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


def launch(
    grid: tuple[int, int, int],
    x_TK: Tensor,
    weights: CodeWeights,
    target: Tensor,
    tiles: CodeTiles,
    call: Call,
) -> None:
    """Launch the product of one weight, or that of each row's weight."""
    x_TK = weights.ordered(x_TK).contiguous()
    offsets = weights.offsets_EGN
    multiply_codes_kernel[grid](
        x_TK, weights.codes_EB, weights.table, weights.scales_EGN, offsets, call.bias, target, call.parts,
        *(call.route or (None,) * 4),
        len(x_TK), weights.num_outputs, weights.num_inputs, weights.scales_EGN.shape[1],
        weights.codes_EB.shape[-1], x_TK.shape[1], triton.cdiv(weights.num_tiles, grid[2]),
        call.multiplier or 0.0,
        CODES=weights.kind, FIRST=weights.first, GROUP=weights.group_size, NUM_CHOSEN=call.num_chosen,
        ADDS=call.multiplier is not None, PRECISION="ieee" if x_TK.dtype is torch.float32 else "tf32",
        OUTPUTS=tiles.outputs, TOKENS=tiles.tokens, INPUTS=weights.inputs,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
