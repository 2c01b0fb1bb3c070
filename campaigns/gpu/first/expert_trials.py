"""The kernels of a mixture of experts, with few tokens and with so many that tiles fill.

Owns: small weights, and what each expert makes of a token in plain torch.

Shapes: T tokens, K experts per token, E experts, H numbers of a hidden state, I gates.
"""

from functools import partial

import torch
from torch import Tensor

from campaigns.gpu.first.trial import Build, Place, Trial, agreement
from worker.gpu.triton_experts import TritonExperts
from worker.model.layer_parts import GateActivation
from worker.model.mixture import Experts, Gate

_NUM_EXPERTS, _NUM_CHOSEN, _HIDDEN_SIZE, _NUM_GATES = 4, 2, 96, 70


def expert_trials(place: Place) -> list[Build]:
    # One for each pair of tiles (worker/gpu/triton_experts.py).
    return [partial(_experts, place, num_tokens) for num_tokens in (3, 50, 120)]


def _experts(place: Place, num_tokens: int) -> Trial:
    weights = [
        place.random(_NUM_EXPERTS, *size, scale=0.1)
        for size in ((_NUM_GATES, _HIDDEN_SIZE), (_NUM_GATES, _HIDDEN_SIZE), (_HIDDEN_SIZE, _NUM_GATES))
    ]
    gate, up, down = weights[0], weights[1].flip(0).contiguous(), weights[2]
    experts = Experts(gate, up, None, None, down, None, Gate(GateActivation.SILU))
    hidden_TH = place.random(num_tokens, _HIDDEN_SIZE)
    ids_TK = (torch.arange(num_tokens)[:, None] * 5 + torch.tensor([0, 3])) % _NUM_EXPERTS
    ids_TK, scores_TK = (
        ids_TK.to(place.device),
        torch.full((num_tokens, _NUM_CHOSEN), 0.5, device=place.device),
    )

    def define() -> list[Tensor]:
        out_TH = torch.zeros((num_tokens, _HIDDEN_SIZE))
        for expert in range(_NUM_EXPERTS):
            x_TH = hidden_TH.cpu().float()
            gated = torch.nn.functional.silu(x_TH @ gate[expert].cpu().float().T)
            gated = gated * (x_TH @ up[expert].cpu().float().T)
            share_T1 = ((ids_TK == expert) * scores_TK).sum(dim=1, keepdim=True).cpu()
            out_TH += share_T1 * (gated @ down[expert].cpu().float().T)
        return [out_TH]

    inputs = {"hidden": hidden_TH, "gates": gate, "down": down, "chosen": ids_TK}
    compute = TritonExperts(experts)
    return agreement(
        f"experts, {num_tokens} tokens", inputs, lambda: [compute(hidden_TH, ids_TK, scores_TK)], define
    )(place.tolerance)
