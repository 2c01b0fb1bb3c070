"""A mixture of experts by our Triton kernels, without the host: four launches whatever the router chose.

Shapes: T tokens, K experts per token, E experts, H numbers of a hidden state.
"""

import torch
from torch import Tensor, nn

from worker.gpu.kernels.expert_products import ExpertTiles, multiply_down, multiply_gate_up, route
from worker.gpu.products import TAKEN
from worker.gpu.quantized.experts import CodeExperts
from worker.model.layer_parts import Unrecognised
from worker.model.mixture import ExpertLinears, Experts, ExpertShards, SummedExperts, shard_experts
from worker.ranks.ranks import Ranks

# Keys are the most pairs that an expert has on average. Two products share a program's registers in
# gate_up_tiles. Warp-group products want 64 pairs; fewer are read by the tensor cores of before.
_GATE_UP_TILES = (
    (16, ExpertTiles(pairs=16, outputs=64, inputs=128, num_warps=4, num_stages=3)),
    (32, ExpertTiles(pairs=32, outputs=64, inputs=128, num_warps=4, num_stages=3)),
    (64, ExpertTiles(pairs=64, outputs=128, inputs=64, num_warps=8, num_stages=3)),
)
_DOWN_TILES = (
    (16, ExpertTiles(pairs=16, outputs=128, inputs=128, num_warps=4, num_stages=3)),
    (32, ExpertTiles(pairs=32, outputs=128, inputs=128, num_warps=4, num_stages=3)),
    (64, ExpertTiles(pairs=64, outputs=128, inputs=64, num_warps=4, num_stages=4)),
)
_WIDE_ITEM_TILES = ExpertTiles(pairs=16, outputs=32, inputs=32, num_warps=4, num_stages=2)
"""Tiles of float32, which has no tensor cores here: it is for trials."""


class TritonExperts(nn.Module):
    """The experts of one layer, in the place of transformers' module. Raises Unrecognised for codes."""

    def __init__(self, experts: ExpertLinears) -> None:
        super().__init__()
        if not isinstance(experts, Experts):
            raise Unrecognised(f"its experts are of {experts.down(0).weight.format}")
        if experts.num_identities:
            raise Unrecognised("some of its experts return what they are given")
        self._experts = experts

    def forward(self, hidden_TH: Tensor, expert_ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        """Return the sum of the outputs of each token's experts, weighed by their scores: [T, H]."""
        num_tokens, num_chosen = expert_ids_TK.shape
        num_experts = len(self._experts.down_EHI)
        gate_up_tiles, down_tiles = choose_tiles(num_tokens * num_chosen, num_experts, hidden_TH.dtype)
        routing = route(expert_ids_TK.contiguous(), num_experts, gate_up_tiles.pairs)
        gated_PI = multiply_gate_up(hidden_TH.contiguous(), self._experts, routing, num_chosen, gate_up_tiles)
        out_TKH = multiply_down(gated_PI, self._experts, routing, scores_TK.contiguous(), down_tiles)
        return out_TKH.sum(dim=1)


def experts_of_rank(experts: ExpertLinears, ranks: Ranks) -> nn.Module:
    """Make a mixture of plain numbers or of codes, or a shard of each expert. Raises Unrecognised."""
    if ranks.size == 1:
        return TritonExperts(experts) if isinstance(experts, Experts) else CodeExperts(experts)
    if isinstance(experts, Experts):
        return SummedExperts(TritonExperts(shard_experts(experts, ranks)), ranks)
    shards = ExpertShards(experts, ranks, size_multiple=TAKEN.size_multiple)
    return SummedExperts(CodeExperts(shards), ranks)


def choose_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype) -> tuple[ExpertTiles, ExpertTiles]:
    """Choose tiles for the gates and for the way down; both have tiles of as many pairs."""
    if dtype is torch.float32:
        return _WIDE_ITEM_TILES, _WIDE_ITEM_TILES
    for (most, gate_up), (_, down) in zip(_GATE_UP_TILES, _DOWN_TILES, strict=True):
        if num_pairs <= most * num_experts:
            return gate_up, down
    return _GATE_UP_TILES[-1][1], _DOWN_TILES[-1][1]
