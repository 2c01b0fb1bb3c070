"""The modules that a product of a device's kernels was made of, and where their outputs are.

Shapes: N outputs of a product.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor, arange, bincount, bucketize, int64, tensor

from worker.model.layer_call import LayerCall, in_kernel_order
from worker.model.layer_parts import GatedMlp, LayerCuts, LayerParts
from worker.model.linear import Cut, Linear, PlainWeight


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """The modules of a product, and where their outputs are in its weight."""

    names: tuple[str, ...]
    """Names within the layer."""
    ends: tuple[int, ...]
    """The end of each module's outputs, as the modules have them; those of all ranks."""
    order_N: Tensor
    """The output that stands at each place of the product's weight."""
    inputs: slice
    """The inputs that this rank has."""

    @classmethod
    def of(cls, names: tuple[str, ...], cut: Cut, order_N: Tensor | None = None) -> "ProductPlan":
        """Plan a product of modules of one input; one module may hold the outputs of several segments.

        `order_N` are the places of the cut's outputs in the product's weight, if they were moved.
        """
        ends = np.cumsum([segment.num_outputs for segment in cut.segments]).tolist()
        if len(names) == 1:
            ends = ends[-1:]
        assert len(ends) == len(names), "each module is a segment"
        outputs_N = cut.outputs_N if order_N is None else cut.outputs_N[order_N]
        return cls(names, tuple(ends), outputs_N, cut.inputs)

    @property
    def own_ends(self) -> tuple[int, ...]:
        """The end of each module's outputs in the product's weight, where modules stand behind each other."""
        modules_N = bucketize(self.order_N, tensor(self.ends), right=True)
        return tuple(bincount(modules_N, minlength=len(self.ends)).cumsum(0).tolist())


class LayerPlan(NamedTuple):
    """The plans of a layer's products; None for those of an MLP that stays."""

    query_key_value: ProductPlan
    attention_output: ProductPlan
    gate_up: ProductPlan | None
    down: ProductPlan | None
    steps: ProductPlan | None
    """See DeltaRule; None for attention."""


def plan_layer(parts: LayerParts, call: LayerCall, gate_up_order_N: Tensor | None = None) -> LayerPlan:
    """Plan the updates of a layer whose gates and ups stand in this order, if they were moved."""
    names, rows, mlp = parts.linear_names, parts.mixer.query_key_value, parts.mlp
    cuts = parts.cuts
    if cuts is None:
        gate_up = mlp.gate_up.whole() if isinstance(mlp, GatedMlp) else None
        down = mlp.down.whole() if isinstance(mlp, GatedMlp) else None
        recurrence = parts.mixer.recurrence
        steps = None if recurrence is None else recurrence.steps.whole()
        cuts = LayerCuts(rows.whole(), parts.mixer.output.whole(), gate_up, down, steps)
    # Numbers that say which output they are, in the order that the rotation asks for.
    mixer, recurrence = replace(parts.mixer, query_key_value=_numbered(rows)), parts.mixer.recurrence
    if recurrence is not None:
        mixer = replace(mixer, recurrence=replace(recurrence, steps=_numbered(recurrence.steps)))
    mixer = in_kernel_order(replace(parts, mixer=mixer), call).mixer
    plan_of_steps = None
    if mixer.recurrence is not None and cuts.steps is not None:
        plan_of_steps = ProductPlan.of(names.steps, cuts.steps, _order_of(mixer.recurrence.steps))
    return LayerPlan(
        ProductPlan.of(names.query_key_value, cuts.query_key_value, _order_of(mixer.query_key_value)),
        ProductPlan.of((names.attention_output,), cuts.attention_output),
        None if cuts.gate_up is None else ProductPlan.of(names.gate_up, cuts.gate_up, gate_up_order_N),
        None if cuts.down is None else ProductPlan.of((names.down,), cuts.down),
        plan_of_steps,
    )


def _numbered(linear: Linear) -> Linear:
    return Linear(PlainWeight(arange(linear.num_outputs)[:, None]), None, linear.segments)


def _order_of(numbered: Linear) -> Tensor:
    return numbered.weight.dequantized(int64)[:, 0]
