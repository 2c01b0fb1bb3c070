"""A mixture of experts by the CPU's kernels: each chosen expert computes its tokens once.

Owns: the packed weights of a layer's experts.
Never: the router.

Shapes: T tokens, K experts per token, P = T * K, H numbers of a hidden state.
"""

import torch
from torch import Tensor, nn

from worker.cpu.cpu_products import TAKEN, pack_gate_up, pack_linear
from worker.cpu.native import Kernels, PackedWeight
from worker.model.layer_parts import GatedMlp, Unrecognised
from worker.model.mixture import Experts


class PackedExperts(nn.Module):
    """The experts of one layer. Raises Unrecognised where the kernels cannot compute them."""

    def __init__(self, experts: Experts, kernels: Kernels) -> None:
        super().__init__()
        if not experts.gate.is_plain or experts.gate_bias_EN is not None:
            raise Unrecognised("its experts have a gate of their own")
        if not TAKEN.include(experts.gate_up(0)) or not TAKEN.include(experts.down(0)):
            raise Unrecognised(f"its experts are {tuple(experts.down_EHI.shape)} {experts.down_EHI.dtype}")
        self._kernels = kernels
        self._packed: list[tuple[PackedWeight, PackedWeight]] = []
        for expert in range(len(experts.down_EHI)):
            mlp = GatedMlp(experts.gate_up(expert), experts.down(expert), experts.gate.activation)
            self._packed.append((pack_gate_up(mlp), pack_linear(mlp.down)))

    def forward(self, hidden_TH: Tensor, expert_ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        """Return the weighed sum of the outputs of each token's experts: [T, H]."""
        num_chosen, ids_P = expert_ids_TK.shape[1], expert_ids_TK.reshape(-1)
        order = ids_P.argsort()
        inputs = hidden_TH[order // num_chosen]
        outputs = torch.empty_like(inputs)
        start = 0
        for expert_id, count in enumerate(ids_P.bincount().tolist()):
            if count:
                gate_up, down = self._packed[expert_id]
                rows = slice(start, start + count)
                outputs[rows] = self._kernels.multiply(self._kernels.multiply(inputs[rows], gate_up), down)
                start += count
        weighed = outputs.float() * scores_TK.reshape(-1)[order].float().unsqueeze(1)
        in_order = weighed.new_empty(weighed.shape).index_copy_(0, order, weighed)
        return in_order.view(len(hidden_TH), num_chosen, -1).sum(dim=1).to(hidden_TH.dtype)
