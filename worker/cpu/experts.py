"""A mixture of experts by the CPU's kernels: each chosen expert computes its tokens once.

Shapes: T tokens, K experts per token, P = T * K, H numbers of a hidden state.
"""

import torch
from torch import Tensor, nn

from worker.adapters.adapted_linear import AdaptablePart, StepAdapters
from worker.adapters.experts import DOWN, GATE_UP
from worker.adapters.product_plan import ProductPlan
from worker.cpu.adapters import AdaptedProduct
from worker.cpu.native import Kernels, PackedWeight, gate_up_order
from worker.cpu.packing.grouped_packing import Inputs
from worker.cpu.products import TAKEN, pack_gate_up, pack_linear
from worker.model.layer_parts import GatedMlp, Unrecognised
from worker.model.mixture import ExpertLinears, ExpertShards, Gate
from worker.ranks.ranks import ALONE, Ranks


class PackedExperts(nn.Module):
    """Experts of a layer, or a shard of each. Raises Unrecognised where the kernels cannot compute them."""

    def __init__(
        self,
        experts: ExpertLinears,
        kernels: Kernels,
        inputs: Inputs = Inputs.AS_THEY_ARE,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        if ranks.size > 1:
            experts = ExpertShards(experts, ranks, size_multiple=TAKEN.size_multiple)
        for linear in (experts.gate_up(0), experts.down(0)):
            if not TAKEN.include(linear):
                raise Unrecognised(f"its experts are {TAKEN.explain(linear)}")
        self._kernels, self._ranks = kernels, ranks
        self._step: StepAdapters | None = None
        self._step_by_expert = StepAdapters()
        self._adapted: list[AdaptedProduct] = []  # the packed weights point to them
        self._packed: list[tuple[PackedWeight, PackedWeight]] = []
        has_bias = experts.gate_up(0).has_bias
        self._gate: Gate | None = None if experts.gate.is_plain and not has_bias else experts.gate
        """The gate that stands between two products; None: the first product computes it."""
        self._plans = _plans(experts, is_plain=self._gate is None)
        for expert in range(experts.num_experts):
            gate_up, down = experts.gate_up(expert), experts.down(expert)
            if self._gate is not None:
                packed = pack_linear(gate_up, inputs)
            else:
                packed = pack_gate_up(GatedMlp(gate_up, down, experts.gate.activation), inputs)
            self._packed.append((packed, pack_linear(down, inputs)))

    def adapt(self, name: str, step: StepAdapters, num_slots: int) -> list[AdaptablePart]:
        """Make the products of all experts compute updates."""
        self._step = step
        for expert, weights in enumerate(self._packed):
            for plan, weight in zip(self._plans, weights, strict=True):
                part = AdaptedProduct(f"{name}.{expert}", plan, self._step_by_expert, num_slots)
                part.attach(weight.c)
                self._adapted.append(part)
        return list(self._adapted)

    def forward(self, hidden_TH: Tensor, expert_ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        """Return the weighed sum of the outputs of each token's experts: [T, H]."""
        num_chosen, ids_P = expert_ids_TK.shape[1], expert_ids_TK.reshape(-1)
        order = ids_P.argsort()
        inputs = hidden_TH[order // num_chosen]
        outputs = torch.empty_like(inputs)
        if self._step is not None:
            self._step_by_expert.begin_some(self._step, order // num_chosen)
        start, is_adapted = 0, self._step_by_expert.has_slots
        for expert_id, count in enumerate(ids_P.bincount().tolist()):
            if count:
                rows = slice(start, start + count)
                if is_adapted:
                    self._step_by_expert.point_to(start)
                outputs[rows] = self._compute(expert_id, inputs[rows])
                start += count
        weighed = outputs.float() * scores_TK.reshape(-1)[order].float().unsqueeze(1)
        in_order = weighed.new_empty(weighed.shape).index_copy_(0, order, weighed)
        sums_TH = in_order.view(len(hidden_TH), num_chosen, -1).sum(dim=1)
        self._ranks.reduce(sums_TH)
        return sums_TH.to(hidden_TH.dtype)

    def _compute(self, expert: int, x: Tensor) -> Tensor:
        if expert >= len(self._packed):  # one that returns what it is given, which is added once
            return x if self._ranks.rank == 0 else torch.zeros_like(x)
        gate_up, down = self._packed[expert]
        if self._gate is None:
            return self._kernels.multiply(self._kernels.multiply(x, gate_up), down)
        gates, ups = self._kernels.multiply_to_float(x, gate_up).chunk(2, dim=-1)
        return self._kernels.multiply(self._gate(gates, ups).to(x.dtype), down)


def _plans(experts: ExpertLinears, *, is_plain: bool) -> tuple[ProductPlan, ProductPlan]:
    """Plan the updates of each expert's two products."""
    if isinstance(experts, ExpertShards):
        gate_up, down = experts.cuts()
    else:
        gate_up, down = experts.gate_up(0).whole(), experts.down(0).whole()
    order_N = gate_up_order(len(gate_up.outputs_N) // 2, gate_up.outputs_N.device) if is_plain else None
    return ProductPlan.of((GATE_UP,), gate_up, order_N), ProductPlan.of((DOWN,), down)
