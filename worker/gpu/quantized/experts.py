"""A mixture of experts of codes on a GPU, without the host: the same launches whatever the router chose.

Shapes: T tokens, K experts per token, P = T * K pairs, H numbers of a hidden state, I gates.
"""

import torch
import triton
from torch import Tensor, nn

from worker.gpu.kernels.expert_products import route
from worker.gpu.quantized.products import (
    CodeWeights,
    ProductArguments,
    choose_tiles,
    find_hindrance,
    grouped,
    launch,
)
from worker.model.layer_parts import Unrecognised
from worker.model.linear import Linear
from worker.model.mixture import ExpertLinears
from worker.quantized.grouped_weight import GroupedWeight


class CodeExperts(nn.Module):
    """The experts of one layer, in the place of transformers' module. Raises Unrecognised."""

    def __init__(self, experts: ExpertLinears) -> None:
        super().__init__()
        self._num_experts, self._gate = experts.num_experts, experts.gate
        self._gate_up, self._gate_up_bias = _stack([experts.gate_up(e) for e in range(experts.num_experts)])
        self._down, self._down_bias = _stack([experts.down(e) for e in range(experts.num_experts)])

    def forward(self, hidden_TH: Tensor, expert_ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        """Return the sum of the outputs of each token's experts, weighed by their scores: [T, H]."""
        num_tokens, num_chosen = expert_ids_TK.shape
        num_pairs = num_tokens * num_chosen
        num_each, dtype = -(-num_pairs // self._num_experts), hidden_TH.dtype
        num_places = choose_tiles(num_each, dtype, self._gate_up).tokens
        routing = route(expert_ids_TK.contiguous(), self._num_experts, num_places)

        def multiply(x: Tensor, weights: CodeWeights, bias: Tensor | None, num_chosen: int) -> Tensor:
            # The router's tiles fix the tokens, even where weights of this kind would take others.
            tiles = choose_tiles(num_each, dtype, weights)._replace(tokens=num_places)
            out_PN = x.new_empty((num_pairs, weights.num_outputs))
            num_tiles = triton.cdiv(weights.num_outputs, tiles.outputs)
            call = ProductArguments(bias=bias, route=routing, num_chosen=num_chosen)
            launch((num_tiles, len(routing.expert_of_tile), 1), x, weights, out_PN, tiles, call)
            return out_PN

        gates_and_ups = multiply(hidden_TH, self._gate_up, self._gate_up_bias, num_chosen)
        gated_PI = self._gate(*gates_and_ups.chunk(2, dim=1))
        out_TKH = multiply(gated_PI, self._down, self._down_bias, 0).view(num_tokens, num_chosen, -1)
        return (out_TKH * scores_TK.unsqueeze(2).to(out_TKH.dtype)).sum(dim=1)


def _stack(linears: list[Linear]) -> tuple[CodeWeights, Tensor | None]:
    """Put the weights of all experts together. Raises Unrecognised where they are of several kinds."""
    weights: list[GroupedWeight] = [grouped(each.weight) for each in linears]
    first = weights[0]
    hindrance = find_hindrance(first)
    if hindrance is None and first.permutation_K is not None:
        hindrance = "their inputs are permuted"
    if hindrance is None and len({(each.kind, each.shape) for each in weights}) > 1:
        hindrance = "they are quantized in several ways"
    if hindrance is not None:
        raise Unrecognised(f"its experts are of {first.format}: {hindrance}")
    biases = [each.bias_N for each in linears if each.bias_N is not None]
    return CodeWeights(weights), torch.stack(biases) if biases else None
