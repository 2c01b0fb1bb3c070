"""The compiled kernels as Python calls them: ctypes over the C functions of csrc/api.cpp.

Owns: the structs of csrc/kernels.h and csrc/layer.h once more, field by field, and the packed form of a
weight. A wrong field is read or written unchecked there.

Shapes: T tokens, K inputs and N outputs of a product, B blocks of 32 outputs, H numbers of a hidden state.
"""

import ctypes
import weakref
from ctypes import Array, Structure, byref, c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.cpu.kernel_build import open_library
from worker.cpu.packing.large_pages import WEIGHTS
from worker.model.layer_parts import GateActivation
from worker.ranks.ranks import Reducer

COLUMNS = 32
"""Outputs of a packed weight that stand together."""
WIDEST_VECTOR = 16
"""Every size that the kernels step through must be a multiple of it."""
_ZERO_OF_INPUTS = 128
"""Added to whole inputs, which the processor's products want without a sign."""
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "float32"}
DTYPES = frozenset(_SUFFIXES)
_NUM_ARGUMENTS = {"multiply": 2, "attend": 2, "convolve": 2, "recur": 2, "run": 8, "run_all": 6}
"""Functions of csrc/api.cpp for each dtype."""
MOST_COLUMNS = 8
"""Most earlier inputs of a convolution."""


class CGroupNumbers(Structure):
    _fields_ = (("data", c_void_p), ("form", c_int), ("units", c_void_p))


class CGroupedCodes(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("kind", c_int),
        ("takes_bytes", c_bool),
        ("group_size", c_int64),
        ("table", c_void_p),
        ("lookup", c_void_p),
        ("shift", c_int32),
        ("scales", CGroupNumbers),
        ("offsets", CGroupNumbers),
        ("permutation", c_void_p),
    )


class CAdapterSlot(Structure):
    _fields_ = (
        ("down", c_void_p),
        ("up", c_void_p),
        ("units", c_void_p),
        ("scales", c_void_p),
        ("num_ranks", c_int64),
    )


class CAdapters(Structure):
    _fields_ = (("step", c_void_p), ("slots", c_void_p), ("max_ranks", c_int64))


class CPackedWeight(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("activation", c_int),
        ("bytes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("grouped", CGroupedCodes),
        ("adapters", c_void_p),
    )


class CProduct(Structure):
    _fields_ = (
        ("input", c_void_p),
        ("num_rows", c_int64),
        ("weight", CPackedWeight),
        ("residual", c_void_p),
        ("output", c_void_p),
        ("float_output", c_void_p),
        ("bytes", c_void_p),
        ("scales", c_void_p),
        ("multiplier", c_float),
        ("run_sums", c_void_p),
        ("shrunk", c_void_p),
        ("run_starts", c_void_p),
        ("input_stride", c_int64),
        ("bytes_stride", c_int64),
    )


class CNorm(Structure):
    _fields_ = (("weight", c_void_p), ("epsilon", c_float), ("bias", c_void_p))


class CHeadShape(Structure):
    _fields_ = (
        ("num_query_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("is_gated", c_bool),
    )


class CAngles(Structure):
    _fields_ = (("cosines", c_void_p), ("sines", c_void_p), ("positions", c_void_p))


class CRotation(Structure):
    _fields_ = (("query_norm", CNorm), ("key_norm", CNorm), ("angles", CAngles), ("rotated_dim", c_int64))


class CPages(Structure):
    _fields_ = (("data", c_void_p), ("block_stride", c_int64), ("row_stride", c_int64))


class CCache(Structure):
    _fields_ = (
        ("keys", CPages),
        ("values", CPages),
        ("stripe", c_int64),
        ("channels", c_void_p),
        ("rows", c_void_p),
    )


class CStateStep(Structure):
    _fields_ = (
        ("pool", c_void_p),
        ("block_bytes", c_int64),
        ("block_ids", c_void_p),
        ("num_stripes", c_int64),
        ("query_starts", c_void_p),
        ("is_first", c_void_p),
        ("num_seqs", c_int64),
        ("keeps_states", c_bool),
    )


class CStep(Structure):
    _fields_ = (
        ("query_starts", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_rows", c_void_p),
        ("num_rows", c_int64),
        ("table_size", c_int64),
        ("token_blocks", c_void_p),
        ("token_offsets", c_void_p),
        ("num_seqs", c_int64),
        ("num_tokens", c_int64),
        ("block_size", c_int64),
        ("ends_seen", c_void_p),
        ("ends_in_windows_only", c_int64),
        ("states", CStateStep),
    )


class CAttentionOptions(Structure):
    _fields_ = (("scaling", c_float), ("window", c_int64), ("softcap", c_float), ("sinks", c_void_p))


class CAttention(Structure):
    _fields_ = (
        ("heads", CHeadShape),
        ("options", CAttentionOptions),
        ("step", CStep),
        ("cache", CCache),
        ("queries", c_void_p),
        ("query_stride", c_int64),
        ("output", c_void_p),
    )


class CStateRun(Structure):
    _fields_ = (("first", c_int64), ("length", c_int64), ("stripe", c_int64), ("offset", c_int64))


class CConvolution(Structure):
    _fields_ = (
        ("step", CStateStep),
        ("runs", c_void_p),
        ("num_channels", c_int64),
        ("num_columns", c_int64),
        ("input", c_void_p),
        ("input_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("is_activated", c_bool),
        ("output", c_void_p),
    )


class CRecurrence(Structure):
    _fields_ = (
        ("step", CStateStep),
        ("runs", c_void_p),
        ("num_heads", c_int64),
        ("num_groups", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("queries", c_void_p),
        ("query_stride", c_int64),
        ("keys", c_void_p),
        ("key_stride", c_int64),
        ("values", c_void_p),
        ("value_stride", c_int64),
        ("log_decay", c_void_p),
        ("decays_by_number", c_bool),
        ("beta", c_void_p),
        ("has_unit_keys", c_bool),
        ("scaling", c_float),
        ("output", c_void_p),
    )


class CRecurrentMixer(Structure):
    _fields_ = (
        ("steps", CPackedWeight),
        ("convolution", c_void_p),
        ("convolution_bias", c_void_p),
        ("num_columns", c_int64),
        ("is_activated", c_bool),
        ("decay_factors", c_void_p),
        ("decay_biases", c_void_p),
        ("num_heads", c_int64),
        ("num_groups", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("scaling", c_float),
        ("norm", CNorm),
    )


class CHalves(Structure):
    _fields_ = (
        ("is_first", c_bool),
        ("projected", c_void_p),
        ("log_decay", c_void_p),
        ("beta", c_void_p),
        ("recurred", c_void_p),
    )


class CLayer(Structure):
    _fields_ = (
        ("hidden_size", c_int64),
        ("attention_norm", CNorm),
        ("query_key_value", CPackedWeight),
        ("heads", CHeadShape),
        ("all_queries_norm", CNorm),
        ("all_keys_norm", CNorm),
        ("rotation", CRotation),
        ("attention", CAttentionOptions),
        ("attention_output", CPackedWeight),
        ("after_attention_norm", CNorm),
        ("mlp_norm", CNorm),
        ("gate_up", CPackedWeight),
        ("down", CPackedWeight),
        ("after_mlp_norm", CNorm),
        ("residual_multiplier", c_float),
        ("mlp_is_parallel", c_bool),
        ("is_shard", c_bool),
        ("recurrent", CRecurrentMixer),
    )


class CStack(Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("norm", CNorm),
        ("num_begun", c_void_p),
    )


class LayerPlace(NamedTuple):
    """The place of a layer in a step."""

    step: CStep
    angles: CAngles
    cache: CCache


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a contiguous tensor's first number; None is C's null."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "kernels know no strides"
    return tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the order in which the kernels read it, and its struct, whose pointers it keeps alive."""

    data: Tensor
    """[B, K / 2, 32, 2] for bfloat16, [B, K, 32] for float32, [B, K / 4, 32, 4] for int8; uint8 for codes
    with scales of groups (packing/grouped_packing.py)."""
    c: CPackedWeight
    kept: tuple[Tensor | None, ...]
    """Bias, scales and the like, for each of B * 32 outputs."""
    numbers: Any = None
    """Scales and offsets of groups (packing/grouped_packing.py)."""

    @property
    def num_outputs(self) -> int:
        """Count the outputs of a product: ups that were weighed by their gates are half of the sums."""
        num_rows = int(self.c.num_outputs)
        return num_rows if self.c.activation == GateActivation.NONE else num_rows // 2

    def rows(self, indices: Tensor) -> Tensor:
        """Look up rows of the weight as it was before, like an embedding: indices [...] to [..., K]."""
        assert self.data.dtype in DTYPES, "numbers in codes are no embedding"
        flat = indices.reshape(-1)
        found = self.data[flat // COLUMNS, :, flat % COLUMNS]
        return found.reshape(*indices.shape, int(self.c.num_inputs))


def pack(
    weight_NK: Tensor, bias_N: Tensor | None = None, activation: GateActivation = GateActivation.NONE
) -> PackedWeight:
    """Copy a weight and its bias into the kernels' order.

    With an activation the outputs are in `gate_up_order`, and a product is half as many.
    """
    data = _in_blocks(weight_NK, step=2 if weight_NK.dtype is torch.bfloat16 else 1)
    c, bias = _struct(weight_NK, bias_N, activation)
    c.data = pointer(data)
    return PackedWeight(data, c, (bias,))


def pack_int8(
    codes_NK: Tensor,
    scales_N: Tensor,
    bias_N: Tensor | None = None,
    activation: GateActivation = GateActivation.NONE,
) -> PackedWeight:
    """Copy a weight of one byte and one scale for each output, as `pack` does."""
    # Some outputs at a time: torch makes int32 of all that it sums.
    sums = [some.sum(dim=1, dtype=torch.int32) for some in torch.split(codes_NK, 32 * COLUMNS)]
    offsets = _padded(_ZERO_OF_INPUTS * torch.cat(sums))
    data, scales = _in_blocks(codes_NK, step=4), _padded(scales_N)
    c, bias = _struct(codes_NK, bias_N, activation)
    c.bytes, c.scales, c.offsets = pointer(data), pointer(scales), pointer(offsets)
    return PackedWeight(data, c, (bias, scales, offsets))


def gate_up_order(num_gates: int, device: torch.device) -> Tensor:
    """Order gates and ups, which come one after the other: 16 gates, the 16 ups they weigh, and so on."""
    order = torch.arange(2 * num_gates, device=device).view(2, -1, WIDEST_VECTOR)
    return order.transpose(0, 1).reshape(-1)


def _struct(
    weight_NK: Tensor, bias_N: Tensor | None, activation: GateActivation
) -> tuple[CPackedWeight, Tensor | None]:
    bias = None if bias_N is None else _padded(bias_N.float())
    num_outputs, num_inputs = weight_NK.shape
    return CPackedWeight(None, pointer(bias), num_inputs, num_outputs, activation), bias


def _padded(values_N: Tensor) -> Tensor:
    """Append zeros up to the next whole block of outputs."""
    padded = values_N.new_zeros(-(-len(values_N) // COLUMNS) * COLUMNS)
    padded[: len(values_N)] = values_N
    return padded


def _in_blocks(weight_NK: Tensor, *, step: int) -> Tensor:
    """Reorder [N, K] to [B, K / step, 32, step].

    The 4 bytes of a step are moved as one number: in 0.5 ns for each of bfloat16, not in 1.7.
    """
    num_outputs, num_inputs = weight_NK.shape
    whole, num_left = divmod(num_outputs, COLUMNS)
    data = WEIGHTS.zeros((whole + (num_left > 0), num_inputs // step, COLUMNS, step), weight_NK.dtype)
    flat = weight_NK.reshape(-1).contiguous()  # without the stride of a single output, which may be any
    if flat.storage_offset() % step:
        flat = flat.clone()
    given, moved = flat.view(torch.int32).view(num_outputs, -1), data.view(torch.int32).squeeze(-1)
    moved[:whole] = given[: whole * COLUMNS].view(whole, COLUMNS, num_inputs // step).transpose(1, 2)
    if num_left:
        moved[whole, :, :num_left] = given[whole * COLUMNS :].T
    return data


class Kernels:
    """An opened library with its threads. Not for several threads at once.

    `instruction_set` is avx512-bf16, avx512-expanded, amx, avx512-vnni, avx-vnni, avx2 or plain; empty takes
    the processor's first.
    Raises OSError if the library cannot or may not be loaded, ValueError if the processor lacks the
    instruction set.
    """

    def __init__(self, library: Path, num_threads: int, instruction_set: str = "") -> None:
        self.library = open_library(library)
        self._library: Any = ctypes.CDLL(str(self.library))
        self._declare()
        self._engine: int | None = self._library.tokenyard_open(instruction_set.encode(), num_threads)
        if self._engine is None:
            raise ValueError(f"this processor, or its system, has no {instruction_set}")
        self.instruction_set: str = self._library.tokenyard_name(self._engine).decode()
        weakref.finalize(self, self._library.tokenyard_close, self._engine)  # its threads end

    def divide(self, reducer: Reducer) -> None:
        """Let `reducer`, whose context must outlive the kernels, sum shards of layers over all ranks."""
        self._library.tokenyard_divide(self._engine, *reducer)

    def multiply(self, x_TK: Tensor, weight: PackedWeight) -> Tensor:
        """Multiply rows by the transposed weight and add the bias: [T, K] to [T, N], in the same dtype."""
        out_TN = x_TK.new_empty((x_TK.shape[0], weight.num_outputs))
        self._multiply(x_TK, weight, output=pointer(out_TN), float_output=None)
        return out_TN

    def multiply_to_float(self, x_TK: Tensor, weight: PackedWeight) -> Tensor:
        """Multiply without rounding the sums, which are float32."""
        out_TN = torch.empty((x_TK.shape[0], weight.num_outputs))
        self._multiply(x_TK, weight, output=None, float_output=pointer(out_TN))
        return out_TN

    def _multiply(
        self, x_TK: Tensor, weight: PackedWeight, *, output: int | None, float_output: int | None
    ) -> None:
        assert weight.data.dtype in (x_TK.dtype, torch.int8, torch.uint8)
        assert x_TK.shape[1] == weight.c.num_inputs
        assert weight.c.num_inputs % WIDEST_VECTOR == 0, "beyond the last row other memory would be read"
        product = CProduct(pointer(x_TK), x_TK.shape[0], weight.c, None, output, float_output, multiplier=1.0)
        self._call("multiply", x_TK.dtype, byref(product))

    def attend(self, attention: CAttention, dtype: torch.dtype) -> None:
        """Attend over a cache that holds the step's keys and values already."""
        self._call("attend", dtype, byref(attention))

    def convolve(self, given: CConvolution, dtype: torch.dtype) -> None:
        """Convolve the sequences of a step, and keep their last inputs."""
        self._call("convolve", dtype, byref(given))

    def recur(self, given: CRecurrence, dtype: torch.dtype) -> None:
        """Continue the recurrences of a step; `dtype` is that of queries, keys and values."""
        self._call("recur", dtype, byref(given))

    def run_layer(
        self,
        layer: CLayer,
        place: LayerPlace,
        hidden_TH: Tensor,
        mlp_input_TH: Tensor | None,
        half: CHalves | None = None,
    ) -> None:
        """Change `hidden_TH` in place, and write the layer's keys and values, or its state.

        `mlp_input_TH` is written for a layer without MLP whose MLP has a norm before it. Of a recurrent layer
        one half may be run, before the state is read or after it was written.
        """
        step, angles, cache = place
        structs = byref(layer), byref(step), byref(angles), byref(cache)
        addresses = pointer(hidden_TH), pointer(mlp_input_TH), None if half is None else byref(half)
        self._call("run", hidden_TH.dtype, *structs, *addresses)

    def run_layers(
        self, stack: CStack, step: CStep, angles: CAngles, caches: Array[CCache], hidden_TH: Tensor
    ) -> None:
        """Change `hidden_TH` in place by all layers and the norm behind them, and write keys and values."""
        structs = byref(stack), byref(step), byref(angles), byref(caches)
        self._call("run_all", hidden_TH.dtype, *structs, pointer(hidden_TH))

    def _call(self, name: str, dtype: torch.dtype, *arguments: Any) -> None:
        if self._functions[name, dtype](self._engine, *arguments):
            raise MemoryError("the CPU kernels have no memory for a step of this size")

    def _declare(self) -> None:
        library = self._library
        library.tokenyard_open.argtypes, library.tokenyard_open.restype = (c_char_p, c_int), c_void_p
        library.tokenyard_close.argtypes, library.tokenyard_close.restype = (c_void_p,), None
        library.tokenyard_name.argtypes, library.tokenyard_name.restype = (c_void_p,), c_char_p
        library.tokenyard_divide.argtypes, library.tokenyard_divide.restype = (c_void_p,) * 3, None
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for dtype, suffix in _SUFFIXES.items():
            for name, num_arguments in _NUM_ARGUMENTS.items():
                function = getattr(library, f"tokenyard_{name}_{suffix}")
                function.argtypes = (c_void_p,) * num_arguments
                self._functions[name, dtype] = function
