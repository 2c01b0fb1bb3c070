"""The files of an adapter: adapter_config.json and adapter_model.safetensors, as peft saves them.

Owns: reading both whole, their digest, and the refusal of every tensor that is no half of a low-rank update.
Never: pickled weights, the network, or a file that may change after its digest was made: the
bytes that are hashed are used.

Shapes: R ranks, N outputs and K inputs of a module.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from worker.adapters.settings import AdapterSettings, read_settings
from worker.model.linear import Cut
from worker.worker_errors import AdapterRefused

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED_FILE = "adapter_model.bin"
FILE_BYTES_OF_A_NUMBER = 4
"""Most bytes of a number in the files; the worker keeps adapters in the numbers of the model."""
_MAX_CONFIG_BYTES = 1 << 20
_HEADER_BYTES = 1 << 24
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_REFUSED_PARTS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "an update of an embedding",
    "modules_to_save": "a module that was trained whole",
    ".bias": "a bias",
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class LowRank(NamedTuple):
    """The update of a linear layer: x becomes scale * x @ down^T @ up^T, added to the product."""

    down_RK: Tensor
    up_NR: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return int(self.down_RK.shape[0])

    def part(self, cut: Cut) -> "LowRank":
        """Cut as the layer is."""
        down_RK = self.down_RK[:, cut.inputs].contiguous()
        return self._replace(down_RK=down_RK, up_NR=self.up_NR[cut.outputs_N])

    def multiply(self, x: Tensor) -> Tensor:
        """Return the update to add to the product of `x`."""
        return (x @ self.down_RK.t().to(x.dtype)) @ self.up_NR.t().to(x.dtype) * self.scale


class Halves(NamedTuple):
    """Both tensors of an update, as the files have them."""

    down: Tensor
    up: Tensor

    def low_rank(self, module: str, settings: AdapterSettings, *, times: int = 1) -> LowRank:
        """Check their ranks, each `times` over, and add the scale. Raises AdapterRefused."""
        rank = settings.rank_of(module) * times
        if self.down.shape[0] != rank or self.up.shape[1] != rank:
            raise AdapterRefused(
                f"{module} has tensors of rank {self.down.shape[0]} and {self.up.shape[1]}, "
                f"and {CONFIG_FILE} says {rank}"
            )
        return LowRank(self.down, self.up, settings.scale_of(module))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """An adapter as its folder holds it."""

    digest: str
    """SHA-256 of both files."""
    settings: AdapterSettings
    halves: dict[str, Halves]
    """Tensors of each module, by its name."""

    def renamed(self, here: str, there: str) -> "AdapterFiles":
        """Give modules whose names begin with `there` the names that the model has for them."""
        halves = {
            here + name.removeprefix(there) if name.startswith(there) else name: both
            for name, both in self.halves.items()
        }
        return replace(self, halves=halves, settings=replace(self.settings, renamed=(here, there)))


def read_adapter(folder: Path, *, max_bytes: int) -> AdapterFiles:
    """Read a folder whose weights are no more than `max_bytes`. Raises AdapterRefused."""
    config_bytes = _read(folder / CONFIG_FILE, _MAX_CONFIG_BYTES)
    if not (folder / WEIGHTS_FILE).is_file() and (folder / _PICKLED_FILE).exists():
        raise AdapterRefused(f"it has {_PICKLED_FILE} only, a pickle, which can run code: save safetensors")
    weight_bytes = _read(folder / WEIGHTS_FILE, max_bytes + _HEADER_BYTES)
    digest = hashlib.sha256(hashlib.sha256(config_bytes).digest() + weight_bytes).hexdigest()
    settings = read_settings(_parse(config_bytes))
    try:
        tensors = load_tensors(weight_bytes)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise AdapterRefused(f"{WEIGHTS_FILE} is damaged: {str(error)[:200]}") from error
    return AdapterFiles(digest=digest, settings=settings, halves=_pair(tensors))


def _read(path: Path, max_bytes: int) -> bytes:
    if path.exists() and not path.is_file():
        raise AdapterRefused(f"{path.name} is no file")  # to open a pipe would wait for its other end
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise AdapterRefused(f"{path.name} cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise AdapterRefused(f"{path.name} is larger than {max_bytes} bytes, which no adapter here needs")
    return content


def _parse(content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{CONFIG_FILE} is no JSON") from error
    if not isinstance(config, dict):
        raise AdapterRefused(f"{CONFIG_FILE} is no JSON object")
    return config


def _pair(tensors: dict[str, Tensor]) -> dict[str, Halves]:
    """Join the halves of each module's update. Raises AdapterRefused with the name of a tensor."""
    for name, tensor in tensors.items():
        part = next((meaning for part, meaning in _REFUSED_PARTS.items() if part in name), None)
        if part is not None:
            raise AdapterRefused(f"tensor {name} is {part}, which is not computed")
        if not name.startswith(_PREFIX) or not name.endswith((_DOWN, _UP)):
            raise AdapterRefused(f"tensor {name} is neither {_DOWN[1:]} nor {_UP[1:]} of a module")
        if tensor.dim() != 2 or tensor.dtype not in _FLOATS:
            raise AdapterRefused(
                f"tensor {name} is {tuple(tensor.shape)} {tensor.dtype}, no matrix of floats"
            )
        if not bool(tensor.isfinite().all()):
            raise AdapterRefused(f"tensor {name} holds numbers that are not finite")
    names = {name.removesuffix(_DOWN).removesuffix(_UP) for name in tensors}
    halves = {}
    for name in sorted(names):
        down, up = tensors.get(name + _DOWN), tensors.get(name + _UP)
        if down is None or up is None:
            lacking = name + (_DOWN if down is None else _UP)
            raise AdapterRefused(f"tensor {lacking} is missing, the other half of its module is there")
        halves[name.removeprefix(_PREFIX)] = Halves(down, up)
    return halves
