"""Updates of a GPU's products by adapters, stacked by slot, and the slots of a step's tokens on the device.

Owns: the memory of all slots, which is allocated at start at the highest rank, so that graphs find it again.

Shapes: T tokens, C rows of the worker, S slots, M modules, R ranks of a module, N outputs and K inputs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from worker.adapters.adapted_linear import NO_SLOT, StepAdapters, WrappedModule
from worker.adapters.files import LowRank
from worker.adapters.product_plan import ProductPlan
from worker.adapters.targets import AdapterWay
from worker.devices.device import Device
from worker.gpu.kernels.adapter_updates import OUTPUTS, StackedUpdates, add_updates
from worker.gpu.products import Product
from worker.model.linear import Linear, linear_of
from worker.steps.model_runner import ModelRunner
from worker.worker_config import WorkerConfig, padded_rank


class GpuStepAdapters(StepAdapters):
    """The slot of each row on the device, brought there before a step where one has changed."""

    def __init__(self, device: Device, *, dtype: torch.dtype, max_num_seqs: int, max_rank: int) -> None:
        super().__init__()
        self.dtype = dtype
        """The dtype of the model, which the weight of a layer of codes does not give."""
        self.max_rank = padded_rank(max_rank)
        # One more row, of no sequence, that padding has.
        self.slots_C = device.tensor(np.full(max_num_seqs + 1, NO_SLOT, np.int32))
        self.rows_T: Tensor | None = None
        """The row of each token, on the device; None outside of steps."""
        self._sent_C = np.full(max_num_seqs, NO_SLOT, np.int32)

    def begin_rows(self, slot_C: NDArray[np.int32], rows_T: NDArray[np.int64]) -> None:  # noqa: ARG002 - the device has them
        """See StepAdapters. Steps that are under way have read what they need: copies are in their order."""
        if not np.array_equal(slot_C, self._sent_C):
            self._sent_C = slot_C.copy()
            self.slots_C[:-1].copy_(torch.from_numpy(self._sent_C), non_blocking=True)

    def take_rows(self, rows_T: Tensor) -> None:
        """Take the row of each token of a step that is about to be launched."""
        self.rows_T = rows_T


class TritonUpdates:
    """The updates of one product. See AdaptablePart."""

    def __init__(
        self, layer_name: str, plan: ProductPlan, weight: Linear, step: GpuStepAdapters, num_slots: int
    ) -> None:
        self._plan, self._step = plan, step
        self._names = tuple(f"{layer_name}.{name}" for name in plan.names)
        like: dict[str, Any] = {"device": weight.weight.device, "dtype": step.dtype}
        num_modules, max_rank = len(plan.names), step.max_rank
        ends = plan.own_ends
        blocks = [
            (module, first, end)
            for module, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True))
            for first in range(start, end, OUTPUTS)
        ]
        self._stack = StackedUpdates(
            torch.zeros((num_slots, num_modules, max_rank, weight.num_inputs), **like),
            torch.zeros((num_slots, weight.num_outputs, max_rank), **like),
            torch.zeros((num_slots, num_modules), device=like["device"]),
            torch.zeros((num_slots, num_modules), device=like["device"], dtype=torch.int32),
            torch.tensor(blocks, device=like["device"], dtype=torch.int32),
        )

    def adapted_names(self) -> tuple[str, ...]:
        return self._names

    def put(self, slot: int, updates: Mapping[str, LowRank]) -> None:
        """See AdaptablePart. Steps under way have no token of this slot."""
        stack, starts = self._stack, (0, *self._plan.ends[:-1])
        max_rank, num_outputs = self._step.max_rank, self._plan.ends[-1]
        up_NR = torch.zeros((num_outputs, max_rank), dtype=stack.up_SNR.dtype)
        ranks, scales = [], []
        for module, (name, start, end) in enumerate(zip(self._names, starts, self._plan.ends, strict=True)):
            update = updates.get(name)
            ranks.append(0 if update is None else update.rank)
            scales.append(0.0 if update is None else update.scale)
            if update is not None:
                # Of a program's ranks some may be no ranks of this adapter.
                own_RK = update.down_RK[:, self._plan.inputs]
                down_RK = torch.zeros((max_rank, own_RK.shape[1]), dtype=stack.down_SMRK.dtype)
                down_RK[: update.rank] = own_RK
                up_NR[start:end, : update.rank] = update.up_NR
                stack.down_SMRK[slot, module].copy_(down_RK)
        stack.up_SNR[slot].copy_(up_NR[self._plan.order_N])
        stack.scales_SM[slot].copy_(torch.tensor(scales))
        stack.ranks_SM[slot].copy_(torch.tensor(ranks, dtype=torch.int32))

    def clear(self, slot: int) -> None:
        self._stack.ranks_SM[slot].zero_()

    def add(self, out_TN: Tensor, x_TK: Tensor, multiplier: float = 1.0) -> None:
        """Add the updates of a step's tokens in place."""
        if self._step.rows_T is not None:
            add_updates(out_TN, x_TK, self._stack, self._step.rows_T, self._step.slots_C, multiplier)


class AdaptedGpuProduct:
    """A product with updates. See Product."""

    def __init__(self, inner: Product, updates: TritonUpdates) -> None:
        self._inner, self._updates = inner, updates

    @property
    def num_outputs(self) -> int:
        return self._inner.num_outputs

    @property
    def has_bias(self) -> bool:
        return self._inner.has_bias

    def multiply(self, x_TK: Tensor) -> Tensor:
        out_TN = self._inner.multiply(x_TK)
        self._updates.add(out_TN, x_TK.contiguous())
        return out_TN

    def multiply_and_add(self, residual_TN: Tensor, x_TK: Tensor, multiplier: float) -> None:
        self._inner.multiply_and_add(residual_TN, x_TK, multiplier)
        self._updates.add(residual_TN, x_TK.contiguous(), multiplier)


class AdaptedGpuLinear(WrappedModule):
    """A linear layer outside of fused ones, with updates. See AdaptablePart."""

    def __init__(self, name: str, inner: nn.Module, step: GpuStepAdapters, num_slots: int) -> None:
        super().__init__(inner)
        linear = linear_of(inner)
        assert linear is not None, "targets are linear layers"
        parent, _, own = name.rpartition(".")
        self._updates = TritonUpdates(parent, ProductPlan.of((own,), linear.whole()), linear, step, num_slots)

    def adapted_names(self) -> tuple[str, ...]:
        return self._updates.adapted_names()

    def put(self, slot: int, updates: Mapping[str, LowRank]) -> None:
        self._updates.put(slot, updates)

    def clear(self, slot: int) -> None:
        self._updates.clear(slot)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., K] to [..., N]."""
        product: Tensor = self.inner(x).contiguous()
        flat = product.view(-1, product.shape[-1])
        self._updates.add(flat, x.reshape(-1, x.shape[-1]).contiguous())
        return product


def adapters_by_triton(
    config: WorkerConfig, runner: ModelRunner, device: Device, *, dtype: torch.dtype
) -> AdapterWay:
    """Let layers compute updates by kernels, from the rows of each step's tokens on."""
    max_rank = config.adapter_limits.max_rank
    step = GpuStepAdapters(device, dtype=dtype, max_num_seqs=config.max_num_seqs, max_rank=max_rank)
    runner.rows_listener = step.take_rows
    return AdapterWay(step, AdaptedGpuLinear)
