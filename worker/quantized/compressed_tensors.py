"""compressed-tensors checkpoints: integers and floats of four and eight bits, by groups, channels or blocks.

Owns: the groups of its quantization_config as far as weights go, and the layout of each of its formats.
Never: asks which modules a group is for: expressions of groups overlap, and its own library, vLLM and writers
disagree on which comes first. Nor rounds activations as the config may ask: they stay as they are, which is
closer to the model.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from worker.quantized.gptq import order_by_group
from worker.quantized.grouped_weight import GroupedWeight
from worker.quantized.mxfp4 import BLOCK, Mxfp4Reader
from worker.quantized.scheme import (
    INTEGER_BITS,
    NVFP4_GROUP,
    IntegerCodes,
    ModuleTensors,
    NoReaders,
    QuantizationRefused,
    Reader,
    Rules,
    SelfReadingRules,
    e2m1_of_16,
    refuse_not_finite,
    scales_of_blocks,
    take_scales,
    unpacked,
    weight_of,
)

_MIXED = "mixed-precision"
_MOST_WAYS = 64


@dataclass(frozen=True, slots=True)
class _Strategy:
    """Span of a scale."""

    name: str
    group_size: int | None
    block: tuple[int, int] | None
    is_symmetric: bool

    def scales(self, tensors: ModuleTensors, shape: tuple[int, int]) -> Tensor:
        """Float32 [N, G]."""
        num_outputs, num_inputs = shape
        if self.name == "block":
            assert self.block is not None
            return scales_of_blocks(tensors, "weight_scale", self.block, shape)
        if self.name == "tensor":
            scale = take_scales(tensors, "weight_scale", (), (1,), (1, 1))
            return scale.reshape(1, 1).expand(num_outputs, 1).contiguous()
        if self.name == "channel":
            return take_scales(tensors, "weight_scale", (num_outputs, 1), (num_outputs,)).view(num_outputs, 1)
        return take_scales(tensors, "weight_scale", (num_outputs, self._groups(tensors, num_inputs)))

    def _groups(self, tensors: ModuleTensors, num_inputs: int) -> int:
        assert self.group_size is not None
        if num_inputs % self.group_size:
            raise tensors.refusal(
                "weight_scale",
                f"is for groups of {self.group_size} of {num_inputs} inputs",
                "by whole groups",
            )
        return num_inputs // self.group_size


@dataclass(frozen=True, slots=True)
class PackedReader:
    """pack-quantized: codes without a sign in words of 32 bits."""

    bits: int
    strategy: _Strategy

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        num_outputs, num_inputs = shape
        per_word = 32 // self.bits
        words = tensors.take("weight_packed", (torch.int32,), (num_outputs, -(-num_inputs // per_word)))
        stored = tensors.take("weight_shape", (torch.int64, torch.int32), (2,))
        if tuple(stored.tolist()) != shape:
            raise tensors.refusal("weight_shape", f"is {stored.tolist()}", str(list(shape)))
        scales_NG = self.strategy.scales(tensors, shape)
        zeros_NG, permutation = None, None
        if not self.strategy.is_symmetric:
            rows = (-(-num_outputs // per_word), scales_NG.shape[1])
            packed = tensors.take("weight_zero_point", (torch.int32,), rows)
            zeros_NG = unpacked(packed.T, self.bits).T[:num_outputs]
        if "weight_g_idx" in tensors:
            g_idx = tensors.take("weight_g_idx", (torch.int32, torch.int64), (num_inputs,))
            size = num_inputs // scales_NG.shape[1]
            permutation = order_by_group(tensors, "weight_g_idx", g_idx, size)
        codes_NK = unpacked(words, self.bits)[:, :num_inputs]
        if permutation is not None:
            codes_NK = codes_NK[:, permutation]
        found = IntegerCodes(
            codes_NK=codes_NK.contiguous(), zeros_NG=zeros_NG, scales_NG=scales_NG, bits=self.bits
        )
        return weight_of(found, permutation)


@dataclass(frozen=True, slots=True)
class ByteReader:
    """int-quantized and float-quantized: a byte a code, with a sign."""

    dtype: torch.dtype
    strategy: _Strategy

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        codes = tensors.take("weight", (self.dtype,), shape)
        scales = self.strategy.scales(tensors, shape)
        if self.dtype is torch.float8_e4m3fn:
            refuse_not_finite(tensors, "weight", codes)
            return GroupedWeight(codes=codes, scales_NG=scales)
        offsets = None
        if not self.strategy.is_symmetric:
            groups = tuple(scales.shape)
            zeros = tensors.take("weight_zero_point", (torch.int8, torch.int32, torch.int64), groups)
            offsets = scales * zeros.float()
        return GroupedWeight(codes=codes, scales_NG=scales, offsets_NG=offsets)


@dataclass(frozen=True, slots=True)
class Nvfp4Reader:
    """nvfp4-pack-quantized: e2m1 with e4m3 scales of 16 inputs, all of them divided by one number."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        weight = e2m1_of_16(tensors, "weight_packed", shape)
        divisor = tensors.take("weight_global_scale", (torch.float32,), (), (1,)).reshape(())
        if not bool(divisor.isfinite()) or divisor == 0:
            raise tensors.refusal("weight_global_scale", f"is {float(divisor)}", "finite and not 0")
        return replace(weight, scales_NG=weight.scales_NG / divisor)


@dataclass(frozen=True, slots=True)
class CompressedTensorsRules(SelfReadingRules):
    """The ways in which a config's groups store weights."""

    readers: tuple[Reader, ...]
    """One at least. Those with zero points come first: others pass over a tensor of zeros."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        """Read by the one that takes all tensors of the module: names, dtypes and shapes tell them apart."""
        refusals: list[tuple[int, QuantizationRefused]] = []
        for reader in self.readers:
            tensors.begin_again()
            try:
                weight = reader.read(tensors, shape)
                tensors.refuse_unread()
            except QuantizationRefused as refusal:
                refusals.append((tensors.num_taken, refusal))
            else:
                return weight
        # What stopped the way that took most is what is wrong with the module.
        raise max(refusals, key=lambda each: each[0])[1]


def read_compressed_tensors_rules(config: dict[str, Any]) -> Rules:
    """Read the rules of compressed-tensors from its `quantization_config`. Raises QuantizationRefused."""
    for name, is_harmless in (("sparsity_config", _is_dense), ("transform_config", lambda found: not found)):
        if not is_harmless(config.get(name)):
            raise QuantizationRefused(
                f"quantization_config has a {name}", fix="take a checkpoint that is quantized only"
            )
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        raise QuantizationRefused(
            "quantization_config has no config_groups that say how weights are stored",
            fix="take a checkpoint that llm-compressor wrote",
        )
    readers: list[Reader] = []
    for name, group in groups.items():
        weights = group.get("weights")
        if weights is None:
            continue
        if group.get("output_activations"):
            raise _refused(name, "output_activations", group["output_activations"], "none")
        readers.append(_reader(name, weights, group.get("format") or config.get("format")))
    ways = sorted(dict.fromkeys(readers), key=lambda each: not _has_zero_points(each))
    if len(ways) > _MOST_WAYS:  # a module may be read in each of them
        raise QuantizationRefused(
            f"quantization_config has {len(ways)} ways of storing weights",
            fix=f"take a checkpoint with {_MOST_WAYS} at most",
        )
    return CompressedTensorsRules(tuple(ways)) if ways else NoReaders()


def _has_zero_points(reader: Reader) -> bool:
    return isinstance(reader, PackedReader | ByteReader) and not reader.strategy.is_symmetric


def _reader(group: str, weights: dict[str, Any], layout: str | None) -> Reader:
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    strategy = _strategy(group, weights)
    if kind == "float" and bits == 4 and strategy.is_symmetric:
        if strategy.group_size == NVFP4_GROUP and layout in ("nvfp4-pack-quantized", _MIXED):
            return Nvfp4Reader()
        if strategy.group_size == BLOCK and layout in ("mxfp4-pack-quantized", _MIXED):
            return Mxfp4Reader("weight_packed", "weight_scale")
    is_float8 = kind == "float" and bits == 8 and strategy.is_symmetric
    if is_float8 and layout in ("float-quantized", "naive-quantized", "mxfp8-quantized", _MIXED):
        return ByteReader(torch.float8_e4m3fn, strategy)
    if kind == "int" and bits in INTEGER_BITS and layout == "pack-quantized":
        return PackedReader(bits, strategy)
    if kind == "int" and bits == 8 and layout in ("int-quantized", "naive-quantized"):
        return ByteReader(torch.int8, strategy)
    raise _refused(
        group,
        "weights",
        f"{kind} of {bits} bits in {layout}",
        "int of 4 or 8 bits in pack-quantized, int of 8 in int-quantized, float of 8 in float-quantized, "
        "or float of 4 in nvfp4-pack-quantized or mxfp4-pack-quantized",
    )


def _strategy(group: str, weights: dict[str, Any]) -> _Strategy:
    size, block = weights.get("group_size"), weights.get("block_structure")
    name = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if isinstance(block, str):
        block = [int(each) if each.isdecimal() else 0 for each in block.split("x")]
    has_group = isinstance(size, int) and size > 0
    has_block = isinstance(block, list) and len(block) == 2 and all(each > 0 for each in block)
    is_known = {
        "tensor": True,
        "channel": True,
        "group": has_group,
        "tensor_group": has_group,
        "block": has_block,
    }
    if not is_known.get(name, False):
        raise _refused(group, "strategy", name, "tensor, channel, group (with group_size) or block")
    return _Strategy(
        name,
        size if has_group else None,
        (block[0], block[1]) if has_block and block else None,
        bool(weights.get("symmetric", True)),
    )


def _refused(group: str, key: str, found: Any, supported: str) -> QuantizationRefused:
    return QuantizationRefused(
        f"quantization_config.{group} has {key} {found}", fix=f"take a checkpoint with {supported}"
    )


def _is_dense(found: Any) -> bool:
    return not found or found.get("format") == "dense"
