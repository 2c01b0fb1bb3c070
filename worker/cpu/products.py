"""Linear layers in the form in which the CPU's kernels multiply by them.

Owns: which formats have a kernel, and what packs each.

Shapes: N outputs, K inputs.
"""

from torch import Tensor

from worker.cpu.native import WIDEST_VECTOR, PackedWeight, gate_up_order, pack, pack_int8
from worker.cpu.packing.grouped_packing import Inputs, find_hindrance, pack_grouped
from worker.model.layer_parts import GateActivation, GatedMlp, TakenWeights
from worker.model.linear import Linear, PlainWeight, Weight
from worker.model.quantization import INT8, Int8Weight, Rounding
from worker.quantized.grouped_weight import EIGHT_BITS, FLOAT8, FOUR_BITS, GroupedWeight


def _find_hindrance(weight: Weight) -> str | None:
    if isinstance(weight, Int8Weight) or not isinstance(weight, GroupedWeight):
        return None
    return find_hindrance(weight)


TAKEN = TakenWeights(
    formats=frozenset(("bfloat16", "float32", INT8, FOUR_BITS, EIGHT_BITS, FLOAT8)),
    size_multiple=WIDEST_VECTOR,
    takes_layer_norms=True,
    find_hindrance=_find_hindrance,
)


def inputs_of(rounding: Rounding) -> Inputs:
    """Return what rows are multiplied as, where the format leaves a choice."""
    return Inputs.INT8 if rounding.of_inputs else Inputs.AS_THEY_ARE


def pack_linear(linear: Linear, inputs: Inputs = Inputs.AS_THEY_ARE) -> PackedWeight:
    """Copy a layer into the kernels' order."""
    return _pack(linear.weight, linear.bias_N, GateActivation.NONE, inputs)


def pack_gate_up(mlp: GatedMlp, inputs: Inputs = Inputs.AS_THEY_ARE) -> PackedWeight:
    """Copy gates and ups, so that the kernel that multiplies by them weighs the ups by the gates."""
    weight = mlp.gate_up.weight
    order_N = gate_up_order(mlp.gate_up.num_outputs // 2, weight.device)
    return _pack(weight.outputs(order_N), None, mlp.activation, inputs)


def _pack(weight: Weight, bias_N: Tensor | None, activation: GateActivation, inputs: Inputs) -> PackedWeight:
    if isinstance(weight, Int8Weight):
        return pack_int8(weight.codes, weight.scales_NG[:, 0], bias_N, activation)
    if isinstance(weight, GroupedWeight):
        return pack_grouped(weight, bias_N, activation, inputs=inputs)
    assert isinstance(weight, PlainWeight)
    return pack(weight.numbers_NK, bias_N, activation)
