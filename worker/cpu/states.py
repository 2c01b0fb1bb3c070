"""Recurrent layers by the CPU's kernels.

Never: computes. Layers that the kernels cannot take (keys that are no multiple of a vector, or another
activation)
are left to ref_states.py.

Shapes: T tokens, C channels, W width of a convolution, H heads, V numbers of a value.
"""

from collections.abc import Sequence
from ctypes import Array, addressof

import numpy as np
import torch
from torch import Tensor

from worker.cpu.native import (
    DTYPES,
    MOST_COLUMNS,
    WIDEST_VECTOR,
    CConvolution,
    CRecurrence,
    CStateRun,
    CStateStep,
    Kernels,
    pointer,
)
from worker.states.interface import Convolution, Recurrence, StateStep
from worker.states.ref_states import RefStates
from worker.states.state_layout import Run, StateLayout

SILU = "silu"


class CpuStates:
    """A StateExecutor over the pool's rows of bytes, one for each block. One step at a time."""

    def __init__(self, pool_NE: Tensor, layout: StateLayout, kernels: Kernels) -> None:
        self._ref = RefStates(pool_NE, layout)
        self._pool, self._layout, self._kernels = pool_NE, layout, kernels
        self.runs = {
            layer_idx: (_structs(layer.channels), _structs(layer.rows))
            for layer_idx, layer in layout.layers.items()
        }
        self._weights: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._layer_idx = -1
        self.step: CStateStep
        self._pointed_to: object = None  # lives as long as the step that points to it

    def begin_step(self, step: StateStep) -> None:
        self._ref.begin_step(step)
        blocks_RS = np.ascontiguousarray(step.blocks_RS, dtype=np.int64)
        self._pointed_to = (step, blocks_RS)
        self.step = CStateStep(
            self._pool.data_ptr(),
            self._layout.block_bytes,
            blocks_RS.ctypes.data,
            blocks_RS.shape[1],
            step.query_starts.ctypes.data,
            step.is_first_R.ctypes.data,
            len(blocks_RS),
            step.keeps_states,
        )

    def begin_layer(self, layer_idx: int) -> None:
        self._layer_idx = layer_idx
        self._ref.begin_layer(layer_idx)

    def convolve(self, given: Convolution) -> Tensor:
        num_channels, width = given.weight_CW.shape
        input_TC, dtype = given.input_TC, given.input_TC.dtype
        can = dtype in DTYPES and given.weight_CW.dtype is dtype and given.activation in (None, SILU)
        if not can or num_channels % WIDEST_VECTOR or width - 1 > MOST_COLUMNS:
            return self._ref.convolve(given)
        weight_WC, bias_C = self._weights_of(given)
        input_TC = _with_stride(input_TC)
        out_TC = torch.empty((len(input_TC), num_channels), dtype=dtype)
        convolution = CConvolution(
            self.step,
            addressof(self.runs[self._layer_idx][0]),
            num_channels,
            width - 1,
            input_TC.data_ptr(),
            input_TC.stride(0),
            pointer(weight_WC),
            pointer(bias_C),
            given.activation is not None,
            pointer(out_TC),
        )
        self._kernels.convolve(convolution, dtype)
        return out_TC

    def recur(self, given: Recurrence) -> Tensor:
        num_tokens, num_heads, value_dim = given.value_THV.shape
        num_groups, key_dim = given.key_TGK.shape[1:]
        if key_dim % WIDEST_VECTOR:
            return self._ref.recur(given)
        query, key, value = given.query_TGK, given.key_TGK, given.value_THV
        dtype = (
            value.dtype
            if value.dtype in DTYPES and query.dtype is key.dtype is value.dtype
            else torch.float32
        )
        query, key, value = (_with_stride(each.to(dtype)) for each in (query, key, value))
        log_decay = given.log_decay.contiguous()
        beta_TH = None if given.beta_TH is None else given.beta_TH.float().contiguous()
        out_THV = torch.empty((num_tokens, num_heads, value_dim))
        recurrence = CRecurrence(
            self.step,
            addressof(self.runs[self._layer_idx][1]),
            num_heads,
            num_groups,
            key_dim,
            value_dim,
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            pointer(log_decay),
            log_decay.dim() == 3,
            pointer(beta_TH),
            given.has_unit_keys,
            given.scaling,
            pointer(out_THV),
        )
        self._kernels.recur(recurrence, dtype)
        return out_THV

    def _weights_of(self, given: Convolution) -> tuple[Tensor, Tensor | None]:
        """Reorder a layer's weights once: they do not change."""
        found = self._weights.get(self._layer_idx)
        if found is None:
            bias_C = None if given.bias_C is None else given.bias_C.float().contiguous()
            found = self._weights[self._layer_idx] = (given.weight_CW.float().t().contiguous(), bias_C)
        return found


def _structs(runs: Sequence[Run]) -> Array[CStateRun]:
    return (CStateRun * len(runs))(*(CStateRun(*run) for run in runs))


def _with_stride(x: Tensor) -> Tensor:
    """Return the tensor, or a copy, such that each token's numbers lie side by side."""
    return x if x[0].is_contiguous() else x.contiguous()
