"""Linear layers in the form in which the CPU's kernels multiply by them.

Owns: the table of formats that have a kernel, each with the function that packs it.

Shapes: N outputs, K inputs.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from worker.cpu.native import WIDEST_VECTOR, PackedWeight, gate_up_order, pack, pack_int8
from worker.cpu.packing.grouped_packing import Inputs, find_hindrance, pack_grouped
from worker.model.layer_parts import GateActivation, GatedMlp, TakenWeights
from worker.model.linear import Linear, PlainWeight, Weight
from worker.model.quantization import Int8Weight, Rounding
from worker.quantized.grouped_weight import EIGHT_BITS, FLOAT8, FOUR_BITS, GroupedWeight

Packer = Callable[[Any, Tensor | None, GateActivation, Inputs], PackedWeight]
"""Takes the weight of one format, a bias, the activation of a merged gate and up product, and what rows are
multiplied as, where the format leaves a choice."""


def _pack_plain(
    weight: PlainWeight, bias_N: Tensor | None, activation: GateActivation, _inputs: Inputs
) -> PackedWeight:
    return pack(weight.numbers_NK, bias_N, activation)


def _pack_int8(
    weight: Int8Weight, bias_N: Tensor | None, activation: GateActivation, _inputs: Inputs
) -> PackedWeight:
    return pack_int8(weight.codes_NK, weight.scales_N, bias_N, activation)


def _pack_grouped(
    weight: GroupedWeight, bias_N: Tensor | None, activation: GateActivation, inputs: Inputs
) -> PackedWeight:
    return pack_grouped(weight, bias_N, activation, inputs=inputs)


_PACKERS: dict[str, Packer] = {
    "bfloat16": _pack_plain,
    "float32": _pack_plain,
    Int8Weight.format: _pack_int8,
    FOUR_BITS: _pack_grouped,
    EIGHT_BITS: _pack_grouped,
    FLOAT8: _pack_grouped,
}


def _find_hindrance(weight: Weight) -> str | None:
    return find_hindrance(weight) if isinstance(weight, GroupedWeight) else None


TAKEN = TakenWeights(
    formats=frozenset(_PACKERS),
    size_multiple=WIDEST_VECTOR,
    takes_layer_norms=True,
    find_hindrance=_find_hindrance,
)


def inputs_of(rounding: Rounding) -> Inputs:
    """Return what rows are multiplied as, where the format leaves a choice."""
    return Inputs.INT8 if rounding.of_inputs else Inputs.AS_THEY_ARE


def pack_linear(linear: Linear, inputs: Inputs = Inputs.AS_THEY_ARE) -> PackedWeight:
    """Copy a layer into the kernels' order."""
    return _PACKERS[linear.weight.format](linear.weight, linear.bias_N, GateActivation.NONE, inputs)


def pack_gate_up(mlp: GatedMlp, inputs: Inputs = Inputs.AS_THEY_ARE) -> PackedWeight:
    """Copy gates and ups, so that the kernel that multiplies by them weighs the ups by the gates."""
    weight = mlp.gate_up.weight
    order_N = gate_up_order(mlp.gate_up.num_outputs // 2, weight.device)
    return _PACKERS[weight.format](weight.outputs(order_N), None, mlp.activation, inputs)
