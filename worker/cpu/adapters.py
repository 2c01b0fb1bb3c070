"""Updates of a fused layer's products, in the form in which the CPU's kernels compute them.

Shapes: R ranks of all updates of a product side by side, N outputs and K inputs, U units of 16 outputs.
"""

import ctypes
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from worker.adapters.adapted_linear import StepAdapters
from worker.adapters.files import LowRank
from worker.adapters.product_plan import ProductPlan
from worker.cpu.native import COLUMNS, CAdapters, CAdapterSlot, CPackedWeight, pointer

_UNIT = 16
_UNIT_FIELDS = np.dtype([("offset", np.int64), ("begin", np.int32), ("end", np.int32)])


class AdaptedProduct:
    """The updates of one product. See AdaptablePart."""

    def __init__(self, layer_name: str, plan: ProductPlan, step: StepAdapters, num_slots: int) -> None:
        self._plan = plan
        self._names = tuple(f"{layer_name}.{name}" for name in plan.names)
        self._slots = (CAdapterSlot * num_slots)()
        self._c = CAdapters(step.address.ctypes.data, ctypes.addressof(self._slots), 0)
        self._kept: dict[int, tuple[object, ...]] = {}  # the structs point to it

    def attach(self, weight: CPackedWeight) -> None:
        """Let the kernels find the updates with the weight, which must not outlive this object."""
        weight.adapters = ctypes.addressof(self._c)

    def adapted_names(self) -> tuple[str, ...]:
        return self._names

    def put(self, slot: int, updates: Mapping[str, LowRank]) -> None:
        own = [updates.get(name) for name in self._names]
        some = [update for update in own if update is not None]
        if not some:
            return
        down_RK = torch.cat([update.down_RK[:, self._plan.inputs] for update in some]).contiguous()
        scales_R = torch.cat([torch.full((update.rank,), update.scale) for update in some])
        up, units = self._pack(own, len(scales_R))
        self._kept[slot] = (down_RK, up, units, scales_R)
        self._slots[slot] = CAdapterSlot(
            pointer(down_RK), pointer(up), units.ctypes.data, pointer(scales_R), len(scales_R)
        )
        self._note_ranks()

    def clear(self, slot: int) -> None:
        self._slots[slot] = CAdapterSlot()
        self._kept.pop(slot, None)
        self._note_ranks()

    def _note_ranks(self) -> None:
        self._c.max_ranks = max(each.num_ranks for each in self._slots)

    def _pack(self, own: list[LowRank | None], num_ranks: int) -> tuple[Tensor, np.ndarray]:
        """Return the numbers of all units, and where each has its own and of which ranks."""
        order_N = self._plan.order_N
        num_places = -(-len(order_N) // COLUMNS) * COLUMNS
        num_units = num_places // _UNIT
        dtype = next(update.up_NR.dtype for update in own if update is not None)
        whole_NR = torch.zeros((self._plan.ends[-1], num_ranks), dtype=dtype)
        # Of each output, the first rank of its module and the one behind the last; none: from the end to 0.
        whole_ranges_N2 = torch.tensor([num_ranks, 0]).repeat(len(whole_NR), 1)
        first_rank = start = 0
        for update, end in zip(own, self._plan.ends, strict=True):
            if update is not None:
                behind = first_rank + update.rank
                whole_NR[start:end, first_rank:behind] = update.up_NR
                whole_ranges_N2[start:end] = torch.tensor([first_rank, behind])
                first_rank = behind
            start = end
        up_NR = torch.zeros((num_places, num_ranks), dtype=dtype)
        ranges_N2 = torch.tensor([num_ranks, 0]).repeat(num_places, 1)
        up_NR[: len(order_N)] = whole_NR[order_N]
        ranges_N2[: len(order_N)] = whole_ranges_N2[order_N]
        begins_U = ranges_N2[:, 0].view(num_units, _UNIT).amin(1)
        ends_U = ranges_N2[:, 1].view(num_units, _UNIT).amax(1)
        units = np.zeros(num_units, _UNIT_FIELDS)
        parts, offset = [], 0
        for begin, end in sorted(set(zip(begins_U.tolist(), ends_U.tolist(), strict=True))):
            alike = ((begins_U == begin) & (ends_U == end)).nonzero()[:, 0]
            if begin >= end:
                continue
            part = up_NR.view(num_units, _UNIT, num_ranks)[alike, :, begin:end].transpose(1, 2)
            size = (end - begin) * _UNIT
            places = alike.numpy()  # a tensor of one number would be taken for that number
            units["offset"][places] = offset + np.arange(len(places)) * size
            units["begin"][places], units["end"][places] = begin, end
            parts.append(part.reshape(-1))
            offset += len(alike) * size
        return torch.cat(parts), units
