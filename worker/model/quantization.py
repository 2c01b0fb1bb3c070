"""The choices of --quantization, --quantize-head and --activations, which round parts of a loaded model.

Owns: the words of the options, the rounding that each one stands for, and the error that it explains.

Shapes: N outputs, K inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from worker.model.linear import Linear, PlainWeight
from worker.quantized.grouped_weight import SIGNED_TABLE, GroupedWeight, gathered, pack_nibbles
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

_NONE = "none"
_HIGHEST_BYTE = 127
_INT4_GROUP = 32
_LOWEST_NIBBLE = -8
_LARGEST_FLOAT8 = 448.0
_HALF, _SINGLE = torch.finfo(torch.float16), torch.finfo(torch.float32)
_LEAST_OF_HALF = _HALF.tiny / 4
"""With two bits less than other numbers of float16 it has as many as one of bfloat16 still."""
_PIECE_NUMBERS = 1 << 20
INT8 = "int8"
"""See Weight.format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight(GroupedWeight):
    """Whole numbers of one byte, with one scale for each output, however its inputs are cut."""

    @property
    def format(self) -> str:
        return INT8

    def inputs(self, start: int, end: int) -> Self:
        return replace(self, codes=self.codes[:, start:end].contiguous())


def round_to_int8(linear: Linear) -> Linear:
    """Round plain weights; the largest number of each output becomes 127. Others are rounded already."""
    if not isinstance(linear.weight, PlainWeight):
        return linear
    return replace(linear, weight=gathered(linear.num_outputs, map(_int8, _pieces(linear.weight))))


def _int8(numbers_NK: Tensor) -> Int8Weight:
    weight_NK = numbers_NK.float()
    scales_N1 = weight_NK.abs().amax(dim=1, keepdim=True) / _HIGHEST_BYTE
    codes_NK = (weight_NK / scales_N1.clamp_min(1e-30)).round().to(torch.int8)
    return Int8Weight(codes=codes_NK, scales_NG=scales_N1)


def round_to_int4(linear: Linear) -> Linear:
    """Round plain weights to four bits; the largest number of each group becomes -8, or nearly so.

    Scales are rounded first, to numbers of 16 bits, which kernels keep as they are. A layer whose inputs are
    no whole groups stays as it is, and codes do.
    """
    weight = linear.weight
    if not isinstance(weight, PlainWeight) or linear.num_inputs % _INT4_GROUP:
        return linear
    pieces = _pieces(weight)
    scales_NG = _in_16_bits(torch.cat([_nibble_scales(piece) for piece in pieces]))  # all in one format
    of_pieces = torch.split(scales_NG, len(pieces[0]))
    return replace(linear, weight=gathered(linear.num_outputs, map(_int4, pieces, of_pieces)))


def _nibble_scales(numbers_NK: Tensor) -> Tensor:
    groups = _in_groups(numbers_NK)
    return groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))[:, :, 0] / _LOWEST_NIBBLE


def _int4(numbers_NK: Tensor, scales_NG: Tensor) -> GroupedWeight:
    inverse_NG = torch.where(scales_NG == 0, 0, 1 / scales_NG)
    codes = (_in_groups(numbers_NK) * inverse_NG.unsqueeze(2)).round()
    codes = codes.clamp(_LOWEST_NIBBLE, -_LOWEST_NIBBLE - 1) - _LOWEST_NIBBLE
    return GroupedWeight(
        codes=pack_nibbles(codes.to(torch.uint8).view(len(numbers_NK), -1)),
        table=SIGNED_TABLE.to(numbers_NK.device),
        scales_NG=scales_NG,
    )


def _in_groups(numbers_NK: Tensor) -> Tensor:
    return numbers_NK.float().view(len(numbers_NK), -1, _INT4_GROUP)


def _in_16_bits(scales: Tensor) -> Tensor:
    """Round scales to float16, or to bfloat16 where that would lose more; those with no inverse become 0."""
    if torch.equal(scales.half().float(), scales):  # of float16 weights, however small
        return scales
    sizes = scales.abs()
    inexact = (sizes > _HALF.max) | ((sizes < _LEAST_OF_HALF) & (sizes > 0))
    rounded = scales.to(torch.bfloat16 if inexact.any() else torch.float16).float()
    return torch.where(rounded.abs() < _SINGLE.tiny, 0, rounded)


def round_to_float8(linear: Linear) -> Linear:
    """Round plain weights to floats of eight bits; the largest number of each output becomes 448."""
    weight = linear.weight
    if not isinstance(weight, PlainWeight):
        return linear
    return replace(linear, weight=gathered(linear.num_outputs, map(_float8, _pieces(weight))))


def _float8(numbers_NK: Tensor) -> GroupedWeight:
    weight_NK = numbers_NK.float()
    scales_N1 = weight_NK.abs().amax(dim=1, keepdim=True) / _LARGEST_FLOAT8
    codes = (weight_NK / scales_N1.clamp_min(1e-30)).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8)
    return GroupedWeight(codes=codes.to(torch.float8_e4m3fn), scales_NG=scales_N1.contiguous())


def _pieces(weight: PlainWeight) -> tuple[Tensor, ...]:
    """Cut a weight by outputs: as float32 all of it would take several times its memory at once."""
    return torch.split(weight.numbers_NK, max(1, _PIECE_NUMBERS // weight.shape[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """One choice of the option."""

    word: str
    quantize: Callable[[Linear], Linear]
    tolerance: float
    """Error of logits over their size. Rounded weights answer a little otherwise, by intent; broken ones
    would answer anything."""


_QUANTIZATIONS = {
    each.word: each
    for each in (
        Quantization(word="int8", quantize=round_to_int8, tolerance=0.3),
        Quantization(word="int4", quantize=round_to_int4, tolerance=0.6),
        Quantization(word="fp8", quantize=round_to_float8, tolerance=0.3),
    )
}
INT8_ROWS = Quantization(word="int8", quantize=lambda linear: linear, tolerance=0.3)
FLOAT8_ROWS = Quantization(word="fp8", quantize=lambda linear: linear, tolerance=0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Everything that the options round."""

    layers: Quantization | None = None
    head: Quantization | None = None
    """Rounding of the output layer."""
    of_inputs: Quantization | None = None
    """Rounding of rows before they are multiplied by codes in groups."""

    @property
    def tolerance(self) -> float | None:
        """Return the relative error of logits that rounding explains; None without rounding."""
        parts = [part.tolerance for part in (self.layers, self.head, self.of_inputs) if part is not None]
        return max(parts, default=None)


NO_ROUNDING = Rounding()


def rounding_of(config: WorkerConfig) -> Rounding:
    """Return what the options name. Raises StartupError for unknown words."""
    heads = {"int8": _QUANTIZATIONS["int8"]}
    return Rounding(
        layers=_find("--quantization", config.quantization, _QUANTIZATIONS),
        head=_find("--quantize-head", config.quantize_head, heads),
        of_inputs=_find(
            "--activations", config.activations, {each.word: each for each in (INT8_ROWS, FLOAT8_ROWS)}
        ),
    )


def refuse_rows(config: WorkerConfig, rows: Quantization, *, device: str, known: Quantization) -> None:
    """Raise StartupError if input rows are to be rounded in a way that a device's kernels have not."""
    if rounding_of(config).of_inputs is rows:
        raise StartupError(
            f"--activations {rows.word} has no kernel for {device}",
            fix=f"leave it out, or ask for --activations {known.word}",
        )


def refuse_quantization(config: WorkerConfig, reason: str, *, fix: str = "leave it out") -> None:
    """Raise StartupError if rounding was asked for; `reason` follows the option and its value."""
    rounding = rounding_of(config)
    for option, found in (
        ("--quantization", rounding.layers),
        ("--quantize-head", rounding.head),
        ("--activations", rounding.of_inputs),
    ):
        if found is not None:
            raise StartupError(f"{option} {found.word}{reason}", fix=fix)


def _find(option: str, word: str, known: dict[str, Quantization]) -> Quantization | None:
    if word == _NONE:
        return None
    found = known.get(word)
    if found is None:
        raise StartupError(
            f"unknown {option} {word}",
            fix=f"ask for one of {', '.join((_NONE, *known))}",
        )
    return found
