"""Several host arrays -> the device, in one copy for which the host does not wait."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.devices.device import Device

_ALIGNMENT = 16
"""Bytes. Kernels load that much at once where they may."""


def upload(device: Device, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Return the arrays as tensors of the device, which share one piece of memory."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = np.empty(end, np.uint8)
    for array, start in zip(arrays, starts, strict=True):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    memory = device.tensor(packed)
    tensors = []
    for array, start in zip(arrays, starts, strict=True):
        flat = memory[start : start + array.nbytes].view(_DTYPES[array.dtype])
        tensors.append(flat if array.ndim == 1 else flat.view(array.shape))
    return tensors


# By the type itself: numpy puts its name together anew each time.
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
