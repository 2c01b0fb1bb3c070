"""The contract between a checkpoint's quantization_config, its readers and the loader.

Shapes: N outputs, K inputs, G groups of inputs.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from worker.checkpoint.gguf.file import BLOCKS, GgufWeight
from worker.checkpoint.passed_over import is_scale_of_values
from worker.checkpoint.patterns import Patterns
from worker.quantized.grouped_weight import (
    E2M1_TABLE,
    SIGNED_TABLE,
    UNSIGNED_TABLE,
    GroupedWeight,
    pack_nibbles,
)
from worker.worker_errors import StartupError, refused_as

MARKERS = frozenset(
    {"weight_packed", "qweight", "weight_scale", "weight_scale_inv", "weight.absmax", "SCB", "_weight_qdata"}
    | {BLOCKS}
)
"""Tensors that no module has that is not quantized."""
INTEGER_BITS = (4, 8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of scales."""
NVFP4_GROUP = 16
_MAX_PATTERNS_S = 5.0
"""Processor time for the patterns of a config, each asked for each of some ten thousand modules."""


def is_bias(last_name: str) -> bool:
    """Tell a bias from the tensors of a weight: it is stored plain, next to them."""
    return last_name == "bias" or last_name.endswith("_bias")


class QuantizationRefused(StartupError):
    """A quantized checkpoint that would not be computed exactly. One line that names the module or tensor."""


contradicting = partial(QuantizationRefused, fix="take a checkpoint whose config and tensors agree")
damaged = partial(QuantizationRefused, fix="download the checkpoint again")
"""Refusals, by what the operator is to do."""


class ModuleTensors:
    """The tensors of one module by their last name. Every lookup raises QuantizationRefused."""

    def __init__(self, module: str, tensors: Mapping[str, Tensor], gguf: GgufWeight | None = None) -> None:
        self.module = module
        self.gguf = gguf
        """Its weight where that is blocks of GGUF files, which are not among the tensors."""
        self._tensors = tensors
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """A tensor of one of these dtypes and shapes."""
        found = self._tensors.get(name)
        if found is None:
            raise QuantizationRefused(
                f"{self.module}.{name} is missing", fix="download the checkpoint again, whole"
            )
        if found.dtype not in dtypes:
            raise self.refusal(name, f"is {_name(found.dtype)}", " or ".join(map(_name, dtypes)))
        if tuple(found.shape) not in shapes:
            raise self.refusal(
                name, f"is {list(found.shape)}", " or ".join(str(list(each)) for each in shapes)
            )
        self._read.add(name)
        return found

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; that of a number where it is missing."""
        return tuple(self._tensors[name].shape) if name in self._tensors else ()

    def take_object(self, name: str) -> dict[str, Any]:
        """An object of JSON, stored as bytes."""
        stored = self.take(name, (torch.uint8,), self.shape_of(name))
        found = json.loads(stored.numpy().tobytes())
        if not isinstance(found, dict):
            raise self.refusal(name, "is no object of JSON", "one")
        return found

    def begin_again(self) -> None:
        """Forget what was taken, before another reader takes them."""
        self._read.clear()

    @property
    def num_taken(self) -> int:
        """Tensors that had the dtype and shape that was asked for."""
        return len(self._read)

    def refuse_unread(self) -> None:
        """Raise QuantizationRefused for a tensor that no reader took and that is not all 0."""
        for name in sorted(self._tensors.keys() - self._read):
            if not (is_bias(name) or is_scale_of_values(name)) and bool(self._tensors[name].float().any()):
                raise self.refusal(name, "is read by nothing", "part of the format, or left out")

    def refusal(self, name: str, what: str, supported: str) -> QuantizationRefused:
        return QuantizationRefused(
            f"{self.module}.{name} {what}", fix=f"take a checkpoint where it is {supported}"
        )


class Reader(Protocol):
    """Reader of the tensors of one module, which makes them its weight."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        """The weight of a linear module [N, K]. Raises QuantizationRefused."""


def read_weight(reader: Reader, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
    """Read a weight [N, K] whole. Raises QuantizationRefused, whatever the tensors make the reader raise."""
    with refused_as(damaged, tensors.module, but=(MemoryError,)):
        weight = reader.read(tensors, shape)
        tensors.refuse_unread()
    return weight


class Rules(Protocol):
    """A quantization_config: how modules of codes are read.

    Which modules these are, their tensors say. Lists of targets and exceptions are written loosely, by names
    of other versions of a family, and with expressions that overlap.
    """

    def reader_of(self, module: str) -> Reader | None:
        """Find the reader of a module of codes; None if the config has none. Raises QuantizationRefused."""


class SelfReadingRules:
    """Rules that read each module in one way."""

    def reader_of(self, module: str) -> Self:  # noqa: ARG002
        return self


class NoReaders:
    """Rules of a config about keys and values alone."""

    def reader_of(self, module: str) -> Reader | None:  # noqa: ARG002
        return None


def find_reader(rules: Rules, module: str, stored: frozenset[str]) -> Reader | None:
    """The reader of a module that is stored as tensors of these last names; None for a plain weight.

    Raises QuantizationRefused for codes that the rules have no reader for.
    """
    if MARKERS.isdisjoint(stored):
        return None
    reader = rules.reader_of(module)
    if reader is None:
        marker = min(MARKERS & stored)
        raise contradicting(f"{module}.{marker} is quantized, and quantization_config does not say how")
    return reader


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerCodes:
    """Codes without a sign, as most formats have them: (code - zero) * scale."""

    codes_NK: Tensor
    """uint8"""
    zeros_NG: Tensor | None
    """Whole numbers; None: the middle of the codes."""
    scales_NG: Tensor
    bits: int


def weight_of(found: IntegerCodes, permutation_K: Tensor | None = None) -> GroupedWeight:
    """Offsets stay away where every zero is the middle of the codes."""
    middle = 1 << (found.bits - 1)
    scales = found.scales_NG.float()
    zeros = found.zeros_NG
    is_symmetric = zeros is None or bool((zeros == middle).all())
    if found.bits == 8:
        codes = (found.codes_NK ^ middle).view(torch.int8)
        offsets = None if zeros is None or is_symmetric else scales * (zeros.float() - middle)
        return GroupedWeight(codes=codes, scales_NG=scales, offsets_NG=offsets, permutation_K=permutation_K)
    return GroupedWeight(
        codes=pack_nibbles(found.codes_NK),
        table=SIGNED_TABLE if is_symmetric else UNSIGNED_TABLE,
        scales_NG=scales,
        offsets_NG=None if zeros is None or is_symmetric else scales * zeros.float(),
        permutation_K=permutation_K,
    )


def unpacked(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes of 4 or 8 bits out of int32 [A, B], the lowest bits first: uint8 [A, B * 32 / bits].

    With `order`, code i of a word is number order[i] of those that it holds.
    """
    raw = words.contiguous().view(torch.uint8)
    codes = torch.stack((raw & 15, raw >> 4), dim=-1).view(len(words), -1) if bits == 4 else raw
    if order is None:
        return codes
    places = torch.tensor(order).argsort()
    return codes.view(len(words), -1, len(order))[:, :, places].reshape(len(words), -1)


def module_patterns() -> Patterns:
    """Make the patterns of a quantization_config, which raise QuantizationRefused."""
    refusal = partial(QuantizationRefused, fix="list the names of the modules instead")
    return Patterns(refusal, max_s=_MAX_PATTERNS_S)


def e2m1_of_16(tensors: ModuleTensors, codes_name: str, shape: tuple[int, int]) -> GroupedWeight:
    """NVFP4 but for the one number that all scales are still to be multiplied by: e4m3 for 16 inputs each."""
    num_outputs, num_inputs = shape
    codes = tensors.take(codes_name, (torch.uint8,), (num_outputs, num_inputs // 2))
    groups = (num_outputs, num_inputs // NVFP4_GROUP)
    scales = tensors.take("weight_scale", (torch.float8_e4m3fn,), groups)
    refuse_not_finite(tensors, "weight_scale", scales)
    return GroupedWeight(codes=codes, table=E2M1_TABLE, scales_NG=scales.float())


def take_scales(tensors: ModuleTensors, name: str, *shapes: tuple[int, ...]) -> Tensor:
    """Scales in float32, which may be stored as exponents of 2 (e8m0), also under the name of bytes."""
    exponents = (torch.float8_e8m0fnu, torch.uint8)
    scales = tensors.take(name, (*FLOATS, *exponents), *shapes)
    if scales.dtype is torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    if not bool(scales.float().isfinite().all()):
        raise tensors.refusal(name, "has scales that are not a number", "finite")
    return scales.float()


def scales_of_blocks(
    tensors: ModuleTensors, name: str, block: tuple[int, int], shape: tuple[int, int]
) -> Tensor:
    """Scales of blocks of outputs and inputs as scales by output and group: float32 [N, G].

    A last block may be short: groups are then as large as divides the inputs.
    """
    (num_outputs, num_inputs), (rows, columns) = shape, block
    stored = (-(-num_outputs // rows), -(-num_inputs // columns))
    scales = take_scales(tensors, name, stored, (stored[0], 1, stored[1], 1)).view(stored)
    size = math.gcd(columns, num_inputs)
    groups = torch.arange(num_inputs // size) * size // columns
    return scales[:, groups].repeat_interleave(rows, dim=0)[:num_outputs].contiguous()


def refuse_not_finite(tensors: ModuleTensors, name: str, codes: Tensor) -> None:
    """Codes of float8 that are no numbers would spoil every token."""
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise tensors.refusal(name, "has codes that are not a number", "finite")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
