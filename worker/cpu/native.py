"""The compiled kernels as Python calls them: ctypes over the C functions of csrc/api.cpp.

Owns: the structs that cross, whose fields are read from csrc/kernels.h and csrc/layer.h, and the packed form
of a weight.

Shapes: T tokens, K inputs and N outputs of a product, B blocks of 32 outputs, H numbers of a hidden state.
"""

import ctypes
import re
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


_HEADERS = [(Path(__file__).parent / "csrc" / name).read_text() for name in ("kernels.h", "layer.h")]
# Functions of a struct stand behind an empty line.
_STRUCTS = dict(
    re.findall(r"^struct (\w+) \{\n(.*?)\n(?:\};)?\n", "".join(_HEADERS), re.MULTILINE | re.DOTALL)
)
_FIELD = re.compile(r"  (?:const )?(\w+)(?:<T>)?(\*[* const]*)? (\w+)(?: = \w+)?;")
_NUMBERS = {"float": c_float, "int64_t": c_int64, "int32_t": c_int32, "bool": c_bool}
_ENUMS = dict.fromkeys(("Activation", "CodeKind", "NumberForm"), c_int)


def _fields_of(struct: str, *others: type[Structure]) -> list[tuple[str, Any]]:
    """Read the fields of a struct in the headers; `others` are the structs that are among them."""
    types = {**_NUMBERS, **_ENUMS, **{each.__name__.removeprefix("C"): each for each in others}}
    fields = []
    for line in _STRUCTS[struct].splitlines():
        if not line.startswith("  //"):
            found = _FIELD.match(line)
            assert found is not None, f"a field of {struct} that is not read: {line}"
            kind, is_pointer, name = found.groups()
            fields.append((name, c_void_p if is_pointer else types[kind]))
    return fields


class CGroupNumbers(Structure):
    _fields_ = _fields_of("GroupNumbers")


class CGroupedCodes(Structure):
    _fields_ = _fields_of("GroupedCodes", CGroupNumbers)


class CAdapterSlot(Structure):
    _fields_ = _fields_of("AdapterSlot")


class CAdapters(Structure):
    _fields_ = _fields_of("Adapters")


class CPackedWeight(Structure):
    _fields_ = _fields_of("PackedWeight", CGroupedCodes)


class CProduct(Structure):
    _fields_ = _fields_of("Product", CPackedWeight)


class CNorm(Structure):
    _fields_ = _fields_of("Norm")


class CHeadShape(Structure):
    _fields_ = _fields_of("HeadShape")


class CAngles(Structure):
    _fields_ = _fields_of("Angles")


class CRotation(Structure):
    _fields_ = _fields_of("Rotation", CNorm, CAngles)


class CPages(Structure):
    _fields_ = _fields_of("Pages")


class CCache(Structure):
    _fields_ = _fields_of("Cache", CPages)


class CStateStep(Structure):
    _fields_ = _fields_of("StateStep")


class CStep(Structure):
    _fields_ = _fields_of("Step", CStateStep)


class CAttentionOptions(Structure):
    _fields_ = _fields_of("AttentionOptions")


class CAttention(Structure):
    _fields_ = _fields_of("Attention", CHeadShape, CAttentionOptions, CStep, CCache)


class CStateRun(Structure):
    _fields_ = _fields_of("StateRun")


class CConvolution(Structure):
    _fields_ = _fields_of("Convolution", CStateStep)


class CRecurrence(Structure):
    _fields_ = _fields_of("Recurrence", CStateStep)


class CRecurrentMixer(Structure):
    _fields_ = _fields_of("RecurrentMixer", CPackedWeight, CNorm)


class CHalves(Structure):
    _fields_ = _fields_of("Halves")


class CLayer(Structure):
    _fields_ = _fields_of(
        "Layer", CNorm, CPackedWeight, CHeadShape, CRotation, CAttentionOptions, CRecurrentMixer
    )


class CStack(Structure):
    _fields_ = _fields_of("Stack", CNorm)


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
