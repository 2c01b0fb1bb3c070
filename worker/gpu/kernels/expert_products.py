"""A mixture of experts on a GPU: tokens sorted by expert, then two products over tiles of one expert each.

Owns: three kernels and their launches: `route` sorts, `multiply_gate_up` multiplies and applies the gate,
`multiply_down` multiplies and weighs.
Source: a grouped product with a grid that is fixed by counts on the host, so that the host never waits and
a graph can capture it. The sort is a counting sort, and so stable.

A pair is one token and one of its experts. Expert e's pairs stand together from starts[e] on. Its tiles are
numbered from starts[e] // M + e on: room for them all, and at most one tile of each expert is left over.

Shapes: T tokens, K experts per token, P = T * K pairs, E experts, H numbers of a hidden state, I gates,
M pairs of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.gpu.kernels.activation import sigmoid
from worker.model.mixture import Experts

_PAIRS_AT_ONCE = 1024
_PRECISION: dict[torch.dtype, str] = {torch.float32: "ieee"}
"""For products; other kernels ignore it."""


class ExpertTiles(NamedTuple):
    """The part of a product that one program takes. Estimates: none was measured."""

    pairs: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


class Routing(NamedTuple):
    """The order of pairs by their experts."""

    pairs_P: Tensor
    """int32: pairs, numbered token * K + choice, in the order of their experts."""
    expert_of_tile: Tensor
    """int32; -1 for a tile that has none."""
    start_of_tile: Tensor
    """int32: where in pairs_P the tile begins."""
    end_of_tile: Tensor
    """int32: where its expert's pairs end."""


@triton.jit(do_not_specialize=["num_pairs"])
def _route_kernel(
    ids_ptr, pairs_ptr, expert_of_tile_ptr, start_of_tile_ptr, end_of_tile_ptr, num_pairs,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per expert counts the pairs before its own and finds its own."""
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=1 << 30).to(tl.int32)
        before += (ids < expert).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    start = tl.sum(before, axis=0)
    end = start + tl.sum(own, axis=0)
    place = start
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=1 << 30).to(tl.int32)
        is_own = (ids == expert).to(tl.int32)
        places = place + tl.cumsum(is_own, axis=0) - 1
        tl.store(pairs_ptr + places, pairs, mask=is_own > 0)
        place += tl.sum(is_own, axis=0)
    first_tile = start // TILE + expert
    last_tile = end // TILE + expert
    for tile in range(first_tile, last_tile + 1):
        tile_start = start + (tile - first_tile) * TILE
        tl.store(expert_of_tile_ptr + tile, tl.where(tile_start < end, expert, -1))
        tl.store(start_of_tile_ptr + tile, tile_start)
        tl.store(end_of_tile_ptr + tile, end)


def route(expert_ids_TK: Tensor, num_experts: int, tile_pairs: int) -> Routing:
    """Sort pairs by expert. Ids are of [0, num_experts), any integer dtype, contiguous."""
    num_pairs, device = expert_ids_TK.numel(), expert_ids_TK.device
    num_tiles = num_pairs // tile_pairs + num_experts
    pairs_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    # Each begins at a multiple of 16 bytes: Triton would compile all three kernels again for other steps.
    of_tiles = torch.empty((3, triton.cdiv(num_tiles, 4) * 4), dtype=torch.int32, device=device)
    routing = Routing(pairs_P, *of_tiles[:, :num_tiles].unbind())
    _route_kernel[(num_experts,)](
        expert_ids_TK, *routing, num_pairs, TILE=tile_pairs, BLOCK=_PAIRS_AT_ONCE, num_warps=4
    )
    return routing


@triton.jit
def _gated(gate, up, alpha, IS_GELU: tl.constexpr):
    """Weigh ups by their gates, as worker.model.mixture.Gate does."""
    inner = alpha * gate
    if IS_GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * sigmoid(inner) * up


@triton.jit
def _gate_up_kernel(
    hidden_ptr, gates_ptr, ups_ptr, gate_bias_ptr, up_bias_ptr, gated_ptr,
    pairs_ptr, expert_of_tile_ptr, start_of_tile_ptr, end_of_tile_ptr,
    hidden_size, num_gates, expert_stride, output_stride, input_stride, bias_expert_stride, bias_stride,
    alpha, limit, up_offset,
    NUM_CHOSEN: tl.constexpr, IS_GELU: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(start_of_tile_ptr + tile) + tl.arange(0, PAIRS)
    is_pair = places < tl.load(end_of_tile_ptr + tile)
    tokens = (tl.load(pairs_ptr + places, mask=is_pair, other=0) // NUM_CHOSEN).to(tl.int64)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_gates
    inputs = tl.arange(0, INPUTS)
    x_ptrs = hidden_ptr + tokens[:, None] * hidden_size + inputs[None, :]
    weights = inputs[:, None] * input_stride + outputs[None, :] * output_stride
    gate_ptrs = gates_ptr + expert * expert_stride + weights
    up_ptrs = ups_ptr + expert * expert_stride + weights
    gate = tl.zeros([PAIRS, OUTPUTS], tl.float32)
    up = tl.zeros([PAIRS, OUTPUTS], tl.float32)
    for first in range(0, hidden_size, INPUTS):
        is_input = inputs < hidden_size - first
        x = tl.load(x_ptrs, mask=is_pair[:, None] & is_input[None, :], other=0.0)
        is_weight = is_input[:, None] & is_output[None, :]
        gate = tl.dot(x, tl.load(gate_ptrs, mask=is_weight, other=0.0), gate, input_precision=PRECISION)
        up = tl.dot(x, tl.load(up_ptrs, mask=is_weight, other=0.0), up, input_precision=PRECISION)
        x_ptrs += INPUTS
        gate_ptrs += INPUTS * input_stride
        up_ptrs += INPUTS * input_stride
    if HAS_BIAS:
        biases = expert * bias_expert_stride + outputs * bias_stride
        gate += tl.load(gate_bias_ptr + biases, mask=is_output, other=0.0).to(tl.float32)[None, :]
        up += tl.load(up_bias_ptr + biases, mask=is_output, other=0.0).to(tl.float32)[None, :]
    gated = _gated(tl.minimum(gate, limit), tl.clamp(up, -limit, limit) + up_offset, alpha, IS_GELU)
    target = places.to(tl.int64)[:, None] * num_gates + outputs[None, :]
    mask = is_pair[:, None] & is_output[None, :]
    tl.store(gated_ptr + target, gated.to(gated_ptr.dtype.element_ty), mask=mask)


def multiply_gate_up(
    hidden_TH: Tensor, experts: Experts, routing: Routing, num_chosen: int, tiles: ExpertTiles
) -> Tensor:
    """Return [P, I], in the order of routing.pairs_P: each pair's ups, weighed by its gates."""
    num_gates = experts.gate_ENH.shape[1]
    gated_PI = hidden_TH.new_empty((len(routing.pairs_P), num_gates))
    bias, gate = experts.gate_bias_EN, experts.gate
    _gate_up_kernel[(triton.cdiv(num_gates, tiles.outputs), len(routing.expert_of_tile))](
        hidden_TH,
        experts.gate_ENH,
        experts.up_ENH,
        bias,
        experts.up_bias_EN,
        gated_PI,
        *routing,
        hidden_TH.shape[1],
        num_gates,
        *experts.gate_ENH.stride(),
        *((0, 0) if bias is None else bias.stride()),
        gate.alpha,
        gate.limit,
        gate.up_offset,
        NUM_CHOSEN=num_chosen,
        IS_GELU=gate.is_gelu,
        HAS_BIAS=bias is not None,
        PRECISION=_PRECISION.get(hidden_TH.dtype, "tf32"),
        PAIRS=tiles.pairs,
        OUTPUTS=tiles.outputs,
        INPUTS=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return gated_PI


@triton.jit
def _down_kernel(
    gated_ptr, down_ptr, bias_ptr, scores_ptr, out_ptr,
    pairs_ptr, expert_of_tile_ptr, start_of_tile_ptr, end_of_tile_ptr,
    hidden_size, num_gates, expert_stride, output_stride, input_stride, bias_expert_stride,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(start_of_tile_ptr + tile) + tl.arange(0, PAIRS)
    is_pair = places < tl.load(end_of_tile_ptr + tile)
    pairs = tl.load(pairs_ptr + places, mask=is_pair, other=0).to(tl.int64)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < hidden_size
    inputs = tl.arange(0, INPUTS)
    x_ptrs = gated_ptr + places.to(tl.int64)[:, None] * num_gates + inputs[None, :]
    weights = inputs[:, None] * input_stride + outputs[None, :] * output_stride
    weight_ptrs = down_ptr + expert * expert_stride + weights
    sums = tl.zeros([PAIRS, OUTPUTS], tl.float32)
    for first in range(0, num_gates, INPUTS):
        is_input = inputs < num_gates - first
        x = tl.load(x_ptrs, mask=is_pair[:, None] & is_input[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=is_input[:, None] & is_output[None, :], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
        x_ptrs += INPUTS
        weight_ptrs += INPUTS * input_stride
    if HAS_BIAS:
        biases = expert * bias_expert_stride + outputs
        sums += tl.load(bias_ptr + biases, mask=is_output, other=0.0).to(tl.float32)[None, :]
    scores = tl.load(scores_ptr + pairs, mask=is_pair, other=0.0).to(tl.float32)
    target = pairs[:, None] * hidden_size + outputs[None, :]
    mask = is_pair[:, None] & is_output[None, :]
    tl.store(out_ptr + target, (sums * scores[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def multiply_down(
    gated_PI: Tensor, experts: Experts, routing: Routing, scores_TK: Tensor, tiles: ExpertTiles
) -> Tensor:
    """Return [T, K, H], weighed by the router's contiguous scores."""
    hidden_size, bias = experts.down_EHI.shape[1], experts.down_bias_EH
    out_TKH = gated_PI.new_empty((*scores_TK.shape, hidden_size))
    _down_kernel[(triton.cdiv(hidden_size, tiles.outputs), len(routing.expert_of_tile))](
        gated_PI,
        experts.down_EHI,
        bias,
        scores_TK,
        out_TKH,
        *routing,
        hidden_size,
        gated_PI.shape[1],
        *experts.down_EHI.stride(),
        0 if bias is None else bias.stride(0),
        HAS_BIAS=bias is not None,
        PRECISION=_PRECISION.get(gated_PI.dtype, "tf32"),
        PAIRS=tiles.pairs,
        OUTPUTS=tiles.outputs,
        INPUTS=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out_TKH
