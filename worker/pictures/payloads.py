"""The prepared bytes of a picture, read from shared memory.

Owns: the form, a file of safetensors with the arguments of a model's `get_image_features`, by name.
Never: owns the memory: who sent it unlinks it.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from scheduler.input_messages import Payload
from worker.worker_errors import SequenceRefused

_SHARED_MEMORY = Path("/dev/shm")
_DTYPES = frozenset({torch.float32, torch.int64, torch.int32, torch.bool})
GRID = "image_grid_thw"
"""Argument of families that take a picture's frames, rows and columns of patches."""


def read_payload(payload: Payload) -> dict[str, Tensor]:
    """Copy the tensors of one picture. Raises SequenceRefused for bytes that are missing or broken."""
    # multiprocessing's own class would unlink the segment when this process ends.
    path = _SHARED_MEMORY / payload.segment.lstrip("/")
    try:
        if path.parent != _SHARED_MEMORY:
            raise ValueError("its name is a path")
        with path.open("rb") as file:
            tensors: dict[str, Tensor] = load(file.read(payload.num_bytes))
    except (OSError, ValueError, SafetensorError) as error:
        raise SequenceRefused(f"the bytes of a picture cannot be read ({type(error).__name__})") from error
    unknown = {tensor.dtype for tensor in tensors.values()} - _DTYPES
    if unknown or not tensors:
        raise SequenceRefused(f"the bytes of a picture are of {unknown or 'no tensor'}")
    grid = tensors.get(GRID)
    if grid is not None and grid.tolist() != [list(payload.grid)]:
        raise SequenceRefused(f"a picture of {grid.tolist()} patches was announced as one of {payload.grid}")
    return tensors
