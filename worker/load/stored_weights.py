"""Quantized weights of linear layers as the files hold them: of one module, or of several as one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from worker.checkpoint.checkpoint_files import StoredTensor
from worker.checkpoint.gguf.file import BLOCKS
from worker.quantized.grouped_weight import GroupedWeight, for_products_in, merged
from worker.quantized.scheme import ModuleTensors, QuantizationRefused, Reader, damaged, read_weight
from worker.worker_errors import refused_as

other_checkpoint = partial(QuantizationRefused, fix="take a checkpoint that is quantized in another way")
"""Refusal of codes that the model has no place for."""


@dataclass(frozen=True, slots=True)
class StoredModule:
    """The tensors of one module in the files, by their last names."""

    module: str
    files: Mapping[str, Path]
    places: Mapping[str, StoredTensor]
    """The same tensors as headers describe them."""
    place: str = ""
    """Name of the module in a model of which the files have another number of layers."""

    @property
    def last_names(self) -> frozenset[str]:
        return frozenset(self.files)

    def read(self) -> ModuleTensors:
        """Copy them into this process's memory: they would be pages of mapped files."""
        if BLOCKS in self.places:
            return ModuleTensors(self.module, {}, self.places[BLOCKS].gguf)
        tensors: dict[str, Tensor] = {}
        for last_name, path in self.files.items():
            with refused_as(damaged, path, but=(MemoryError,)), safe_open(path, framework="pt") as file:
                tensors[last_name] = file.get_tensor(f"{self.module}.{last_name}").clone()
        return ModuleTensors(self.module, tensors)


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A linear layer's tensors, their reader, and the shape that the model gives it."""

    stored: StoredModule
    reader: Reader
    dtype: torch.dtype
    """In which the model computes."""
    shape: tuple[int, int]

    def read(self) -> GroupedWeight:
        return for_products_in(self.dtype, read_weight(self.reader, self.stored.read(), self.shape))


@dataclass(frozen=True, slots=True)
class MergedLinear:
    """Linear layers of the files whose outputs are those of one in the model, in their order."""

    parts: tuple[StoredLinear, ...]
    shape: tuple[int, int]

    def read(self) -> GroupedWeight:
        """Raise QuantizationRefused where they are quantized in different ways."""
        return read_merged(self.parts)


def read_merged(parts: Sequence[StoredLinear]) -> GroupedWeight:
    """Read the outputs of several layers one after the other. Raises QuantizationRefused."""
    try:
        return merged([each.read() for each in parts])
    except ValueError as error:
        first, last = parts[0].stored.module, parts[-1].stored.module
        raise other_checkpoint(f"{first} is quantized otherwise than {last}: {error}") from error
