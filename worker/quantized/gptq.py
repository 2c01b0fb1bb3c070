"""GPTQ checkpoints: four or eight bits, packed along inputs, whose groups may be spread over all inputs.

Source: arXiv:2210.17323.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic_core import SchemaValidator
from torch import Tensor

from worker.checkpoint.patterns import Patterns
from worker.quantized.grouped_weight import GroupedWeight
from worker.quantized.scheme import (
    FLOATS,
    INTEGER_BITS,
    IntegerCodes,
    ModuleTensors,
    QuantizationRefused,
    module_patterns,
    unpacked,
    weight_of,
)

_ADDED_TO_ZEROS = {"gptq": {4: 0x11111111, 8: 0x01010101}, "gptq_v2": {4: 0, 8: 0}}
"""Numbers by checkpoint_format and bits: the first version took one off all zeros of a word by a subtraction,
which borrows from the next zero where one is 0. Added to the word, modulo 2**32, they undo it."""


@dataclass(frozen=True, slots=True)
class GptqReader:
    bits: int
    group_size: int
    """-1: all inputs are one group."""
    version: str
    """Key of _ADDED_TO_ZEROS."""
    is_symmetric: bool
    """Every zero is the middle of the codes: writers differ in what they store."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        num_outputs, num_inputs = shape
        size, per_word = num_inputs if self.group_size == -1 else self.group_size, 32 // self.bits
        if num_outputs % per_word or num_inputs % per_word or num_inputs % size:
            raise tensors.refusal(
                "qweight", f"of {list(shape)} in groups of {size}", "whole words and groups"
            )
        groups = num_inputs // size
        qweight = tensors.take("qweight", (torch.int32,), (num_inputs // per_word, num_outputs))
        qzeros = tensors.take("qzeros", (torch.int32,), (groups, num_outputs // per_word))
        scales = tensors.take("scales", FLOATS, (groups, num_outputs))
        codes_NK = unpacked(qweight.T, self.bits)
        zeros_NG = None
        if not self.is_symmetric:
            words = qzeros + _ADDED_TO_ZEROS[self.version][self.bits]
            zeros_NG = unpacked(words, self.bits).T.contiguous()
        permutation = None
        if "g_idx" in tensors:
            g_idx = tensors.take("g_idx", (torch.int32, torch.int64), (num_inputs,))
            permutation = order_by_group(tensors, "g_idx", g_idx, size)
        if permutation is not None:
            codes_NK = codes_NK[:, permutation]
        return weight_of(
            IntegerCodes(
                codes_NK=codes_NK.contiguous(),
                zeros_NG=zeros_NG,
                scales_NG=scales.T.contiguous(),
                bits=self.bits,
            ),
            permutation,
        )


def order_by_group(tensors: ModuleTensors, name: str, g_idx: Tensor, size: int) -> Tensor | None:
    """The order of inputs in which groups stand together; None if they do already."""
    groups = torch.arange(len(g_idx)) // size
    if torch.equal(g_idx.long(), groups):
        return None
    permutation = g_idx.long().argsort(stable=True)
    if not torch.equal(g_idx.long()[permutation], groups):
        raise tensors.refusal(name, f"has groups that are not of {size} inputs", "a permutation of groups")
    return permutation


@dataclass(frozen=True, slots=True)
class GptqRules:
    reader: GptqReader
    patterns: Patterns
    dynamic: tuple[tuple[SchemaValidator, dict[str, Any]], ...]
    """Settings by regular expressions for the start of a name, of which the first counts."""

    def reader_of(self, module: str) -> GptqReader:
        for expression, overrides in self.dynamic:
            if self.patterns.accept(expression, module):
                return self._overridden(module, overrides)
        return self.reader

    def _overridden(self, module: str, overrides: dict[str, Any]) -> GptqReader:
        bits = _bits(overrides.get("bits", self.reader.bits), module)
        size = int(overrides.get("group_size", self.reader.group_size))
        return GptqReader(
            bits, size, self.reader.version, overrides.get("sym", self.reader.is_symmetric) is True
        )


def read_gptq_rules(config: dict[str, Any]) -> GptqRules:
    """Read the rules of GPTQ from its `quantization_config`. Raises QuantizationRefused."""
    version = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if version not in _ADDED_TO_ZEROS:
        raise QuantizationRefused(
            f"quantization_config has checkpoint_format {version}", fix="take one of gptq or gptq_v2"
        )
    bits = _bits(config.get("bits", 4), "quantization_config")
    reader = GptqReader(bits, int(config.get("group_size", -1)), version, config.get("sym") is True)
    settings = (config.get("dynamic") or {}).items()
    named = [(name.removeprefix("+:"), each) for name, each in settings if not name.startswith("-:")]
    patterns = module_patterns()
    dynamic = tuple((patterns.compile(f"^(?:{name})", name, "dynamic"), each) for name, each in named)
    return GptqRules(reader, patterns, dynamic)


def _bits(bits: Any, where: str) -> int:
    if bits not in INTEGER_BITS:
        raise QuantizationRefused(f"{where} has codes of {bits} bits", fix="take a checkpoint of 4 or 8")
    return int(bits)
