"""Quantized weights of linear layers as the files hold them: of one module, or of several as one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from worker.checkpoint.checkpoint_files import StoredTensor
from worker.checkpoint.gguf.file import BLOCKS
from worker.quantized.grouped_weight import GroupedWeight, for_products_in, merged
from worker.quantized.scheme import (
    ModuleTensors,
    QuantizationRefused,
    Reader,
    damaged,
    is_bias,
    read_weight,
)
from worker.worker_errors import refused_as

other_checkpoint = partial(QuantizationRefused, fix="take a checkpoint that is quantized in another way")
"""Refusal of codes that the model has no place for."""
_STACKS = ("down_proj", "down_proj_packed", "down_proj_blocks")
"""Names of a stack of experts, which has the name of the model's parameter."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_OF_A_WEIGHT = frozenset({"packed", "shape", "scale", "scale_inv", "global_scale", "zero_point"})
"""Ends of names next to a stack; next to a weight they follow that word."""


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

    @property
    def has_stacks(self) -> bool:
        """Whether these are matrices of codes of all experts of a layer, in a tensor each."""
        return any(name in self.places and self.places[name].dtype not in _FLOATS for name in _STACKS)

    def read(self) -> ModuleTensors:
        """Copy them into this process's memory: they would be pages of mapped files."""
        if BLOCKS in self.places:
            return ModuleTensors(self.module, {}, self.places[BLOCKS].gguf)
        return ModuleTensors(self.module, self.read_tensors())

    def read_tensors(self) -> dict[str, Tensor]:
        """Copy all but blocks of GGUF files."""
        tensors: dict[str, Tensor] = {}
        for last_name, path in self.files.items():
            with refused_as(damaged, path, but=(MemoryError,)), safe_open(path, framework="pt") as file:
                tensors[last_name] = file.get_tensor(f"{self.module}.{last_name}").clone()
        return tensors


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
class StoredStack:
    """Codes of one matrix of all experts, with scales for each of them or for all."""

    stored: StoredModule
    reader: Reader
    dtype: torch.dtype
    parameter: str
    shape: tuple[int, int, int]
    """Experts, outputs and inputs."""
    is_transposed: bool
    """Inputs come before outputs in the file, of codes and of scales."""

    @property
    def files(self) -> dict[str, Path]:
        """Files of the matrix's tensors, by their last names."""
        files = self.stored.files
        return {name: files[name] for name in files if name.startswith(self.parameter) and not is_bias(name)}

    def read(self) -> list[GroupedWeight]:
        num_experts, num_outputs, num_inputs = self.shape
        stacks = {
            _name_in_module(name.removeprefix(self.parameter)): stack
            for name, stack in replace(self.stored, files=self.files).read_tensors().items()
        }
        found = []
        for expert in range(num_experts):
            parts = {
                name: self._matrix(stack[expert]) if stack.dim() and len(stack) == num_experts else stack
                for name, stack in stacks.items()
            }
            of_expert = ModuleTensors(f"{self.stored.module}.{self.parameter}[{expert}]", parts)
            weight = read_weight(self.reader, of_expert, (num_outputs, num_inputs))
            found.append(for_products_in(self.dtype, weight))
        return found

    def _matrix(self, stored: Tensor) -> Tensor:
        is_turned = self.is_transposed and stored.dim() > 1
        return (stored.T if is_turned else stored).clone(memory_format=torch.contiguous_format)


def _name_in_module(end: str) -> str:
    """Return the name that a tensor has in a module of one weight, by the end of its name next to a stack."""
    end = end.removeprefix("_")
    return f"weight_{end}" if end in _OF_A_WEIGHT else end or "weight"


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
