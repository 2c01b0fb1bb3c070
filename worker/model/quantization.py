"""The choices of --quantization: how the weights of a model are rounded when it is loaded.

Owns: the words of the option, the rounding that each one stands for, and the error that it explains.
Never: multiplies (each device's kernels), or reads checkpoints whose weights were rounded before.

Shapes: N outputs, K inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.model.linear import Linear, PlainWeight
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

_NONE = "none"
_HIGHEST_BYTE = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Whole numbers of one byte, with one scale for each output. See Weight."""

    codes_NK: Tensor
    """int8"""
    scales_N: Tensor
    """float32"""
    format = "int8"

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_inputs = self.codes_NK.shape
        return num_outputs, num_inputs

    @property
    def device(self) -> torch.device:
        return self.codes_NK.device

    @property
    def num_bytes(self) -> int:
        return self.codes_NK.nbytes + self.scales_N.nbytes

    def outputs(self, indices_N: Tensor) -> "Int8Weight":
        return Int8Weight(self.codes_NK[indices_N], self.scales_N[indices_N])

    def inputs(self, start: int, end: int) -> "Int8Weight":
        return Int8Weight(self.codes_NK[:, start:end].contiguous(), self.scales_N)

    def merge(self, others: Sequence["Int8Weight"]) -> "Int8Weight":
        all_of_them = [self, *others]
        return Int8Weight(
            torch.cat([each.codes_NK for each in all_of_them]),
            torch.cat([each.scales_N for each in all_of_them]),
        )

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return (self.codes_NK.float() * self.scales_N[:, None]).to(dtype)


def round_to_int8(linear: Linear) -> Linear:
    """Round plain weights; the largest number of each output becomes 127. Others are rounded already."""
    if not isinstance(linear.weight, PlainWeight):
        return linear
    weight_NK = linear.weight.numbers_NK.float()
    scales_N = weight_NK.abs().amax(dim=1) / _HIGHEST_BYTE
    codes_NK = (weight_NK / scales_N.clamp_min(1e-30)[:, None]).round().to(torch.int8)
    return replace(linear, weight=Int8Weight(codes_NK, scales_N))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """One choice of the option."""

    word: str
    quantize: Callable[[Linear], Linear]
    tolerance: float
    """Error of logits over their size. Rounded weights answer a little otherwise, by intent; broken ones
    would answer anything."""


_QUANTIZATIONS = {
    each.word: each for each in (Quantization(word="int8", quantize=round_to_int8, tolerance=0.3),)
}


def quantization_of(config: WorkerConfig) -> Quantization | None:
    """Return the quantization that the options name; None for no rounding. Raises StartupError."""
    if config.quantization == _NONE:
        return None
    found = _QUANTIZATIONS.get(config.quantization)
    if found is None:
        raise StartupError(
            f"unknown --quantization {config.quantization}",
            fix=f"ask for one of {', '.join((_NONE, *_QUANTIZATIONS))}",
        )
    return found


def refuse_quantization(config: WorkerConfig, reason: str, *, fix: str = "leave it out") -> None:
    """Raise StartupError if quantization was asked for; `reason` follows the option and its value."""
    if quantization_of(config) is not None:
        raise StartupError(f"--quantization {config.quantization}{reason}", fix=fix)
