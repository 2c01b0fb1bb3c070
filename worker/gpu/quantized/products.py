"""Linear layers of codes in the form in which a GPU multiplies by them.

Shapes: T tokens, N outputs, K inputs, R rows of scales, W words of all outputs, E experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear as linear_of_torch
from torch.nn.functional import pad
from triton import language as tl

from worker.devices.dependent_launch import launch_way
from worker.gpu.kernels.expert_products import Routing
from worker.gpu.quantized.kernels.code_kernels import multiply_codes_kernel, write_numbers_kernel
from worker.gpu.quantized.kernels.numbers import (
    FLOAT8,
    INT8,
    NIBBLES_BY_TABLE,
    NIBBLES_E2M1,
    NIBBLES_FROM_ZERO,
    NIBBLES_LESS_EIGHT,
    NUM_RANGES_OF_BYTES,
    NUM_RANGES_OF_NIBBLES,
    goes_by_bits,
)
from worker.gpu.quantized.kernels.scales import find_short_dtype, stack_of_groups
from worker.model.linear import Linear, PlainWeight, Weight
from worker.quantized.grouped_weight import E2M1_TABLE, SIGNED_TABLE, UNSIGNED_TABLE, GroupedWeight

_SMALLEST_SIDE = 16
"""A tensor core's tile has no smaller side."""
_MOST_NIBBLE_INPUTS, _MOST_BYTE_INPUTS = 32, 64
"""Inputs of a range: with all ranges of a word, a tile has 128."""
_FEWEST_TILES_OF_A_SPLIT = 2
_WRITTEN_OUTPUTS = 32
_SIZE_OF_FLOAT8 = 0x7F
"""The bits of a code without its sign; with all of them it is no number."""


class CodeTiles(NamedTuple):
    """The part of a product that one program takes: measured on an H200 for 1, 16 and 64 rows."""

    tokens: int
    outputs: int
    num_warps: int
    num_stages: int
    programs: int = 1
    """Programs that share a product, at most: on a device of 132 processors these were the fastest."""


_TILES_OF_NIBBLES = (
    CodeTiles(tokens=8, outputs=128, num_warps=4, num_stages=3, programs=528),
    CodeTiles(tokens=16, outputs=128, num_warps=4, num_stages=3, programs=528),
    CodeTiles(tokens=32, outputs=128, num_warps=4, num_stages=3, programs=264),
    CodeTiles(tokens=64, outputs=128, num_warps=8, num_stages=3, programs=132),
    CodeTiles(tokens=128, outputs=128, num_warps=8, num_stages=3, programs=132),
)
_TILES_OF_BYTES = (
    CodeTiles(tokens=8, outputs=64, num_warps=2, num_stages=4, programs=264),
    CodeTiles(tokens=16, outputs=64, num_warps=4, num_stages=4, programs=264),
    CodeTiles(tokens=32, outputs=64, num_warps=4, num_stages=4, programs=264),
    CodeTiles(tokens=64, outputs=64, num_warps=4, num_stages=4, programs=264),
    CodeTiles(tokens=128, outputs=128, num_warps=8, num_stages=3, programs=132),
)
_OTHER_TILES_OF_NIBBLES = {
    64: (
        CodeTiles(tokens=64, outputs=128, num_warps=4, num_stages=3, programs=264),
        CodeTiles(tokens=64, outputs=64, num_warps=4, num_stages=3, programs=396),
    ),
    128: (CodeTiles(tokens=64, outputs=128, num_warps=4, num_stages=3, programs=264),),
}
_OTHER_TILES_OF_BYTES = {64: (CodeTiles(tokens=64, outputs=128, num_warps=4, num_stages=3, programs=264),)}
"""Tiles of which two programs or three share a processor, by the tokens of the tiles above."""
_WIDE_ITEM_TILES = CodeTiles(tokens=16, outputs=32, num_warps=4, num_stages=1, programs=264)
"""Tiles of float32, which has no tensor cores here: it is for trials."""
_MOST_SHARED = max(each.programs for each in (*_TILES_OF_NIBBLES, *_TILES_OF_BYTES, _WIDE_ITEM_TILES)) // 2
"""Outputs and tokens of a program that others share, at most."""


class ProductArguments(NamedTuple):
    """Further arguments of a product."""

    bias: Tensor | None = None
    parts: Tensor | None = None
    """float32, for the sums of each program, where several share the inputs of one product."""
    arrivals: Tensor | None = None
    """With parts: int32 zeros, one for all programs of the same outputs and tokens."""
    row_scales: Tensor | None = None
    """float32, for each row a factor of its products."""
    multiplier: float | None = None
    """A factor of the product, which is added to the target; without one, the target is overwritten."""
    route: Routing | None = None
    """Rows of several weights, each to be multiplied by one of them."""
    num_chosen: int = 0
    """With a route: of how many pairs each row of input is one; 0 where input has a row for each pair."""


def choose_tiles(num_tokens: int, dtype: torch.dtype, weights: "CodeWeights") -> CodeTiles:
    """Choose the tiles of a product of `num_tokens` rows of one weight."""
    if dtype is torch.float32:
        return _WIDE_ITEM_TILES
    tiles = _TILES_OF_NIBBLES if weights.is_nibbles else _TILES_OF_BYTES
    return next((each for each in tiles if num_tokens <= each.tokens), tiles[-1])


def find_hindrance(weight: Weight) -> str | None:
    """Say why there is no product by this weight; None where there is one."""
    if not isinstance(weight, GroupedWeight):
        return None
    if weight.group_size % _SMALLEST_SIDE:
        return f"groups of {weight.group_size} inputs are no multiple of {_SMALLEST_SIDE}"
    if weight.table is not None and not torch.equal(weight.table.bfloat16().float(), weight.table.float()):
        return "the table has numbers that bfloat16 has not"
    return None


class CodeWeights:
    """One weight, or those of several experts, in the order of the kernels.

    A tile is four ranges of inputs, or two for codes of eight bits; a word has a code of each. A tile's words
    stand together, which is read fastest; with `in_rows` those of an output do, as a matrix has them.
    """

    def __init__(self, weights: Sequence[GroupedWeight], *, in_rows: bool = False) -> None:
        first = weights[0]
        is_nibbles = first.codes.dtype is torch.uint8
        self.num_outputs, self.num_inputs = first.shape
        self._in_rows = in_rows
        most = _MOST_NIBBLE_INPUTS if is_nibbles else _MOST_BYTE_INPUTS
        self.num_ranges = NUM_RANGES_OF_NIBBLES if is_nibbles else NUM_RANGES_OF_BYTES
        self.group_size = first.group_size if first.scales_NG.shape[1] > 1 else 0
        if self.group_size % (most * self.num_ranges):
            # Tiles and groups are to divide each other: a group of neither is cut to a power of two.
            self.group_size &= -self.group_size
        self.inputs = min(self.group_size or most, most)
        self.num_tiles = -(-self.num_inputs // (self.inputs * self.num_ranges))
        words = [self._in_words(each) for each in weights]
        self.words_EW = torch.stack(words) if len(words) > 1 else words[0].unsqueeze(0)
        self.is_nibbles = is_nibbles
        self.kind, self.table = _kind_of(first)
        self._has_bit_way = self.table is None and not any(map(_has_no_number, weights))
        self.short, self.scales_ERN, self.offsets_ERN = self._pack_scales(weights)
        self.permutation_K = first.permutation_K

    @property
    def strides(self) -> tuple[int, int]:
        """Words from an output to the next, and from a tile to the next."""
        if self._in_rows:
            return self.num_tiles * self.inputs, self.inputs
        return self.inputs, self.num_outputs * self.inputs

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Write the numbers [N, K] of the one weight, in the order of its codes."""
        numbers_NK = torch.empty(
            (self.num_outputs, self.num_inputs), dtype=dtype, device=self.words_EW.device
        )
        write_numbers_kernel[(self.num_tiles, triton.cdiv(self.num_outputs, _WRITTEN_OUTPUTS))](
            self.words_EW, self.table, self.scales_ERN, self.offsets_ERN, numbers_NK,
            self.num_outputs, self.num_inputs, *self.strides,
            CODES=self.kind, BY_BITS=self.goes_by_bits(dtype), GROUP=self.group_size, SHORT=self.short,
            OUTPUTS=_WRITTEN_OUTPUTS, INPUTS=self.inputs, num_warps=4,
        )  # fmt: skip
        return numbers_NK

    def goes_by_bits(self, dtype: torch.dtype) -> bool:
        """Tell whether codes become numbers of a dtype two at a time."""
        return self._has_bit_way and goes_by_bits(dtype)

    def ordered(self, x_TK: Tensor) -> Tensor:
        """Bring inputs into the order of the codes."""
        return x_TK if self.permutation_K is None else x_TK[:, self.permutation_K]

    def _in_words(self, weight: GroupedWeight) -> Tensor:
        is_nibbles = weight.codes.dtype is torch.uint8
        codes_NK = weight.nibbles() if is_nibbles else weight.codes.view(torch.uint8)
        missing = -self.num_inputs % (self.inputs * self.num_ranges)
        if missing:
            codes_NK = pad(codes_NK, (0, missing))
        ranges = codes_NK.view(self.num_outputs, self.num_tiles, self.num_ranges, self.inputs)
        if not self._in_rows:
            ranges = ranges.transpose(0, 1)
        if not is_nibbles:
            # A word is a byte of each range, the first below.
            return ranges.transpose(2, 3).contiguous().view(torch.int16).flatten()
        words = ranges[:, :, 0].to(torch.int16, memory_format=torch.contiguous_format)
        for place in range(1, self.num_ranges):
            words |= ranges[:, :, place].to(torch.int16).mul_(1 << (4 * place))
        return words.flatten()

    def _pack_scales(self, weights: Sequence[GroupedWeight]) -> tuple[tl.dtype, Tensor, Tensor | None]:
        """Return the dtype of numbers that share words, and scales and offsets as they are loaded."""
        scales = [each.scales_NG for each in weights]
        offsets = [each.offsets_NG for each in weights if each.offsets_NG is not None]
        tile, times = self.inputs * self.num_ranges, 1
        if self.group_size:
            times = weights[0].group_size // self.group_size
        groups_of_tile = tile // self.group_size if 0 < self.group_size < tile else 1
        short = find_short_dtype(torch.stack(scales)) if groups_of_tile > 1 else None

        def stack(numbers: Sequence[Tensor]) -> Tensor:
            return stack_of_groups(numbers, times=times, groups_of_tile=groups_of_tile, short=short)

        named = tl.float32 if short is None else tl.float16 if short is torch.float16 else tl.bfloat16
        return named, stack(scales), stack(offsets) if offsets else None


def _kind_of(weight: GroupedWeight) -> tuple[int, Tensor | None]:
    """Return CODES, and a table if numbers are looked up."""
    if weight.table is None:
        return (INT8 if weight.codes.dtype is torch.int8 else FLOAT8), None
    table = weight.table.float().cpu()
    orders = ((NIBBLES_FROM_ZERO, UNSIGNED_TABLE), (NIBBLES_LESS_EIGHT, SIGNED_TABLE))
    for kind, numbers in (*orders, (NIBBLES_E2M1, E2M1_TABLE)):
        if torch.equal(table, numbers):
            return kind, None
    return NIBBLES_BY_TABLE, weight.table.float()


def _has_no_number(weight: GroupedWeight) -> bool:
    """Tell whether a code of eight bits is none of a number."""
    if weight.codes.dtype is not torch.float8_e4m3fn:
        return False
    return bool((weight.codes.view(torch.uint8) & _SIZE_OF_FLOAT8 == _SIZE_OF_FLOAT8).any())


def grouped(weight: Weight) -> GroupedWeight:
    """Return a weight of any format that this folder multiplies by."""
    assert isinstance(weight, GroupedWeight)
    return weight


def without_codes(linear: Linear) -> Linear:
    """Forget codes, which their product has in an order of its own; sizes stay."""
    if not isinstance(linear.weight, GroupedWeight):
        return linear
    one = torch.zeros((1, 1), dtype=torch.bfloat16, device=linear.weight.device)
    return replace(linear, weight=PlainWeight(one.expand(linear.weight.shape)))


class CodeProduct:
    """The product of a linear layer of codes. See Product (gpu/products.py), and CodeWeights."""

    def __init__(self, linear: Linear, *, in_rows: bool = False) -> None:
        self._weights = CodeWeights([grouped(linear.weight)], in_rows=in_rows)
        self._bias_N = linear.bias_N
        self._arrivals = torch.zeros(_MOST_SHARED, dtype=torch.int32, device=linear.weight.device)
        self.num_outputs, self.num_inputs = linear.num_outputs, linear.num_inputs
        self._described = f"{self.num_outputs} x {self.num_inputs} in {grouped(linear.weight).kind}"
        self.fewest_by_numbers: int | None = None
        """Rows from which on the codes' numbers are written, rounded to the rows' dtype, and multiplied by
        cuBLAS. None: never."""
        self._taken_tiles: dict[CodeTiles, CodeTiles] = {}

    @property
    def has_bias(self) -> bool:
        return self._bias_N is not None

    def describe(self) -> str:
        """Name sizes and format for a person; products that are named alike take about the same time."""
        return self._described

    @property
    def float8_words(self) -> tuple[Tensor, int]:
        """Codes as float8_e4m3fn [N, K], where they are such and stand in rows, and the inputs of a range.

        Inputs are in the order of the words, and of as many tiles as they begin.
        """
        words = self._weights.words_EW[0].view(self.num_outputs, -1)
        return words.view(torch.float8_e4m3fn), self._weights.inputs

    @property
    def memory(self) -> Tensor:
        """Return the codes, which each product reads."""
        return self._weights.words_EW

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

    def multiply_by_tiles(self, x_TK: Tensor, tiles: CodeTiles) -> Tensor:
        """Return [T, N], with the bias, by tiles that are not those of the product."""
        out_TN = x_TK.new_empty((len(x_TK), self.num_outputs))
        self._launch(x_TK, out_TN, None, tiles=tiles)
        return out_TN

    def other_tiles(self, num_tokens: int, dtype: torch.dtype) -> tuple[CodeTiles, ...]:
        """List further tiles of as many rows, which may be faster on a device."""
        others = _OTHER_TILES_OF_NIBBLES if self._weights.is_nibbles else _OTHER_TILES_OF_BYTES
        return others.get(choose_tiles(num_tokens, dtype, self._weights).tokens, ())

    def take_tiles(self, num_tokens: int, dtype: torch.dtype, tiles: CodeTiles) -> None:
        """Multiply by these tiles from now on where as many rows have the same ones as now."""
        self._taken_tiles[choose_tiles(num_tokens, dtype, self._weights)] = tiles

    def multiply_scaled(self, x_TK: Tensor, scales_T: Tensor) -> Tensor:
        """Return [T, N], with the bias, of rows that are to be multiplied by float32 scales."""
        out_TN = x_TK.new_empty((len(x_TK), self.num_outputs))
        self._launch(x_TK, out_TN, None, scales_T)
        return out_TN

    def multiply_scaled_and_add(
        self, residual_TN: Tensor, x_TK: Tensor, scales_T: Tensor, multiplier: float
    ) -> None:
        """Add the product of such rows, times `multiplier`, to the residual in place. There is no bias."""
        self._launch(x_TK, residual_TN, multiplier, scales_T)

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

    def _launch(
        self,
        x_TK: Tensor,
        target_TN: Tensor,
        multiplier: float | None,
        row_scales_T: Tensor | None = None,
        tiles: CodeTiles | None = None,
    ) -> None:
        weights = self._weights
        if tiles is None:
            tiles = choose_tiles(len(x_TK), x_TK.dtype, weights)
            tiles = self._taken_tiles.get(tiles, tiles)
        grid = (triton.cdiv(self.num_outputs, tiles.outputs), triton.cdiv(len(x_TK), tiles.tokens))
        num_splits = count_splits(grid[0] * grid[1], weights.num_tiles, tiles.programs)
        call = ProductArguments(self._bias_N, multiplier=multiplier, row_scales=row_scales_T)
        if num_splits > 1:
            shape = (grid[0] * grid[1] * num_splits, tiles.tokens * tiles.outputs)
            parts = torch.empty(shape, dtype=torch.float32, device=x_TK.device)
            call = call._replace(parts=parts, arrivals=self._arrivals)
        launch((*grid, num_splits), x_TK, weights, target_TN, tiles, call)


def count_splits(num_programs: int, num_tiles: int, most_programs: int) -> int:
    """Divide the inputs among programs that keep a GPU busy, each with some tiles at least."""
    wanted = min(most_programs // num_programs, num_tiles // _FEWEST_TILES_OF_A_SPLIT)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


def launch(
    grid: tuple[int, int, int],
    x_TK: Tensor,
    weights: CodeWeights,
    target: Tensor,
    tiles: CodeTiles,
    call: ProductArguments,
) -> None:
    """Launch the product of one weight, or that of each row's weight."""
    x_TK = weights.ordered(x_TK).contiguous()
    is_wide = x_TK.dtype is torch.float32
    multiply_codes_kernel[grid](
        x_TK, call.row_scales, weights.words_EW, weights.table, weights.scales_ERN, weights.offsets_ERN,
        call.bias, target, call.parts, call.arrivals, *(call.route or (None,) * 4),
        len(x_TK), weights.num_outputs, weights.num_inputs, weights.words_EW.shape[1], *weights.strides,
        x_TK.shape[1], triton.cdiv(weights.num_tiles, grid[2]), grid[2], call.multiplier or 0.0,
        CODES=weights.kind, GROUP=weights.group_size, SHORT=weights.short, NUM_CHOSEN=call.num_chosen,
        BY_BITS=weights.goes_by_bits(x_TK.dtype),
        IS_WHOLE=weights.num_inputs % (weights.inputs * weights.num_ranges) == 0,
        ADDS=call.multiplier is not None, PRECISION="ieee" if is_wide else "tf32",
        OUTPUTS=tiles.outputs, TOKENS=tiles.tokens, INPUTS=weights.inputs,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **launch_way(),
    )  # fmt: skip
