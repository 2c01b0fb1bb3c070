"""The modules of a model around its layers, by fewer launches: rotary tables and the norm at the end.

Owns: tables of cosines and sines of every position, made at load by the model's own module, so that a step
looks up what it would compute in ten launches; the norm by our kernel. Each is compared with the module in
whose place it stands, and stays away where it differs.

Shapes: T tokens, L positions, A numbers of a position: its cosines and its sines.
"""

import inspect
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.devices.trial import ROUNDING, relative_error
from worker.gpu.kernels.norm import LARGEST_ROW, norm
from worker.gpu.triton_layer import TritonLayer
from worker.memory_sizes import format_size
from worker.model.layer_call import Rotation
from worker.model.layer_parts import RmsNorm, TakenWeights, Unrecognised, read_norm

log = logging.getLogger(__name__)

_MOST_TABLE_BYTES = 256 << 20
"""Memory for the tables of a model. A context of a million tokens is rotated by the model's own module."""
_POSITIONS_AT_ONCE = 4096
_NUM_TRIED = 64
_SEED = 3


class _Angles(NamedTuple):
    """The rotations that one module computes."""

    name: str
    module: nn.Module
    layer_types: tuple[str | None, ...]
    """Kinds of layers with a rotation each; (None,) where all have one."""
    num_frequencies: int
    """Frequencies of all layer types together."""


class TableRotary(nn.Module):
    """The rotation of each position by its line of a table, in the place of a model's own module."""

    def __init__(self, computed: nn.Module, tables: dict[str | None, Tensor]) -> None:
        super().__init__()
        self.computed = computed
        self._tables = tables

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Rotation:
        """Return cosines and sines, each [1, T, R]."""
        table_LA = self._tables.get(layer_type)
        if table_LA is None or position_ids.shape[:-1] != (1,) or x.dtype != table_LA.dtype:
            given = () if layer_type is None else (layer_type,)
            rotation: Rotation = self.computed(x, position_ids, *given)
            return rotation
        cosines_1TR, sines_1TR = functional.embedding(position_ids, table_LA).chunk(2, dim=-1)
        return cosines_1TR, sines_1TR


class TritonNorm(nn.Module):
    """A root-mean-square norm outside of layers."""

    def __init__(self, by: RmsNorm) -> None:
        super().__init__()
        self._by = by

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm the rows of [..., H]."""
        return norm(hidden.reshape(-1, hidden.shape[-1]).contiguous(), self._by).view_as(hidden)


def table_bytes(model: nn.Module, max_model_len: int, dtype: torch.dtype) -> int:
    """Count the memory of the tables that `replace_frame` will make."""
    num_frequencies = sum(each.num_frequencies for each in _find_angles(model))
    num_bytes = (max_model_len + 1) * num_frequencies * 4 * dtype.itemsize
    return num_bytes if num_bytes <= _MOST_TABLE_BYTES else 0


def replace_frame(model: nn.Module, taken: TakenWeights, max_model_len: int) -> None:
    """Replace rotary modules and the norm behind the last layer, where layers are ours."""
    bodies = _bodies(model)
    if not bodies:
        return
    weight = next(each for each in model.parameters() if each.dtype in ROUNDING)
    if table_bytes(model, max_model_len, weight.dtype):
        for angles in list(_find_angles(model)):
            _replace_angles(model, angles, max_model_len, weight)
    for body in bodies:
        for name, child in list(body.named_children()):
            _replace_norm(body, name, child, taken)


def _bodies(model: nn.Module) -> list[nn.Module]:
    """Find the modules that hold the list of our layers."""
    lists = {name.rpartition(".")[0] for name, each in model.named_modules() if isinstance(each, TritonLayer)}
    return [model.get_submodule(name.rpartition(".")[0]) for name in sorted(lists)]


def _find_angles(model: nn.Module) -> Iterator[_Angles]:
    """Find modules whose rotation depends on positions alone."""
    for name, module in model.named_modules():
        rope_type: Any = getattr(module, "rope_type", None)
        if rope_type is None or isinstance(module, TableRotary) or ".computed" in name:
            continue
        if rope_type == "axial":  # a tower's, by rows and columns
            continue
        parameters = list(inspect.signature(module.forward).parameters)
        if parameters not in (["x", "position_ids"], ["x", "position_ids", "layer_type"]):
            continue
        frequencies = [
            buffer
            for buffer_name, buffer in module.named_buffers()
            if buffer_name.endswith("inv_freq") and not buffer_name.endswith("original_inv_freq")
        ]
        types = tuple(rope_type) if isinstance(rope_type, dict) else (None,)
        yield _Angles(name, module, types, sum(each.numel() for each in frequencies))


@torch.inference_mode()
def _replace_angles(model: nn.Module, angles: _Angles, max_model_len: int, weight: Tensor) -> None:
    x_111 = weight.new_zeros((1, 1, 1))
    positions_L = torch.arange(max_model_len + 1, device=weight.device)
    tables: dict[str | None, Tensor] = {}
    for layer_type in angles.layer_types:
        given = () if layer_type is None else (layer_type,)
        lines = [
            torch.cat(angles.module(x_111, positions_L[None, start:end], *given), dim=-1)[0]
            for start, end in pairwise([*range(0, len(positions_L), _POSITIONS_AT_ONCE), len(positions_L)])
        ]
        table_LA = torch.cat(lines)
        if table_LA.dtype == weight.dtype:  # a family that rotates in float32 keeps its module
            tables[layer_type] = table_LA
    found = TableRotary(angles.module, tables)
    generator = torch.Generator().manual_seed(_SEED)
    tried_1T = torch.randint(max_model_len, (1, _NUM_TRIED), generator=generator).to(weight.device)
    x_1TH = torch.randn((1, _NUM_TRIED, 8), generator=generator).to(weight)
    for layer_type in tables:
        given = () if layer_type is None else (layer_type,)
        pairs = zip(found(x_1TH, tried_1T, *given), angles.module(x_1TH, tried_1T, *given), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            log.warning("the rotations of %s depend on more than positions: it stays", angles.name)
            return
    if tables:
        num_bytes = sum(table.nbytes for table in tables.values())
        log.info("rotations of %d positions are looked up in %s", len(positions_L), format_size(num_bytes))
        _put(model, angles.name, found)


@torch.inference_mode()
def _replace_norm(body: nn.Module, name: str, child: nn.Module, taken: TakenWeights) -> None:
    """Replace a norm outside of layers."""
    try:
        by = read_norm(child, taken)
    except Unrecognised:
        return
    weight = next(child.parameters())
    if type(by) is not RmsNorm or len(by.weight_H) > LARGEST_ROW:
        return
    ours, generator = TritonNorm(by), torch.Generator().manual_seed(_SEED)
    hidden_1TH = torch.randn((1, 3, len(by.weight_H)), generator=generator).to(weight)
    error = relative_error(ours(hidden_1TH).float(), child(hidden_1TH).float())
    if error <= ROUNDING[weight.dtype]:
        setattr(body, name, ours)
    else:
        log.warning("our norm in the place of %s is wrong by %.1e: it stays", name, error)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
