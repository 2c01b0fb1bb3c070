"""The gate of an MLP on a GPU: act(gate) * up, from one merged product.

Source: SwiGLU and GEGLU, arXiv:2002.05202.

Shapes: T tokens, I gates; a merged row is all gates, then all ups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.devices.dependent_launch import launch_way, wait_first
from worker.model.layer_parts import GateActivation

_BLOCK = 1024
"""Gates of a program."""


@triton.jit
def sigmoid(x):  # noqa: ANN201 - Triton's own type
    """1 / (1 + exp(-x)), without an exponential that could overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr) -> tl.tensor:
    """act(gate) * up in float32; ACTIVATION as GateActivation numbers them."""
    if ACTIVATION == 1:
        return gate * sigmoid(gate) * up
    else:
        # tanh(u) = 2 * sigmoid(2u) - 1, so 0.5 * (1 + tanh(u)) is sigmoid(2u).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * sigmoid(inner) * up


@triton.jit
def _gate_kernel(
    gate_up_ptr, out_ptr, num_gates,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    wait_first(WAITS)
    token = tl.program_id(0).to(tl.int64)
    gates = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = gates < num_gates
    row_ptr = gate_up_ptr + token * 2 * num_gates
    gate = tl.load(row_ptr + gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + num_gates + gates, mask=mask, other=0.0).to(tl.float32)
    out = gated(gate, up, ACTIVATION)
    tl.store(out_ptr + token * num_gates + gates, out.to(out_ptr.dtype.element_ty), mask=mask)


def multiply_by_gates(gate_up_TM: Tensor, activation: GateActivation) -> Tensor:
    """Weigh ups by their gates: [T, 2 * I], contiguous, to [T, I]."""
    num_tokens, num_gates = gate_up_TM.shape[0], gate_up_TM.shape[1] // 2
    out_TI = torch.empty((num_tokens, num_gates), dtype=gate_up_TM.dtype, device=gate_up_TM.device)
    _gate_kernel[(num_tokens, triton.cdiv(num_gates, _BLOCK))](
        gate_up_TM, out_TI, num_gates, ACTIVATION=int(activation), BLOCK=_BLOCK, num_warps=4,
        **launch_way(),
    )  # fmt: skip
    return out_TI
