"""The weights of a model in a GGUF file: their names, and what is to be undone of each tensor's numbers."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from worker.checkpoint.gguf.families import GgufFamily, family_of
from worker.checkpoint.gguf.file import BLOCKS, GgufFile, GgufTensor, GgufWeight, other_file
from worker.checkpoint.gguf.layouts import UNCHANGED, Change
from worker.worker_errors import StartupError

ROTARY_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Numbers that config.json says (rotary.py)."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_STACK = "_exps"
_BARE = "ssm_a"
"""The one tensor that is named without an ending."""
# Of tensors that are parts of one weight, those that come last.
_LAST_PARTS = frozenset({"ffn_up_exps", "attn_v_b", "attn_gate"})
_other_file_or_form = partial(StartupError, fix="take another GGUF file, or the model's safetensors")


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor in the model."""

    stored: str
    module: str
    """Its module; the whole name of a parameter that is not called weight or bias."""
    kind: str
    """weight, bias, or empty."""
    part: str
    """The file's name for it, without layer and kind."""


def find_weights_of(file: GgufFile) -> Iterator[GgufWeight]:
    """Yield all weights. Raises StartupError for a tensor that the family does not have."""
    family = family_of(file)
    changes = family.changes(file)
    places: dict[str, list[_Place]] = defaultdict(list)
    for stored in file.tensors:
        if stored in ROTARY_TENSORS or _predicts_further(file, stored):
            continue
        place = _place_of(file, family, stored)
        places[f"{place.module}.{place.kind}"].append(place)
    for found in places.values():
        found.sort(key=lambda place: place.part in _LAST_PARTS)
        tensors = [file.tensors[place.stored] for place in found]
        change = changes.get(found[0].part, UNCHANGED)
        if found[0].part.endswith(_STACK):
            yield from _experts(file, found, tensors, change)
        else:
            yield _weight(found, tensors, change)


def _weight(places: list[_Place], tensors: list[GgufTensor], change: Change) -> GgufWeight:
    first = places[0]
    is_plain = all(each.type.is_plain for each in tensors)
    for place, tensor in zip(places, tensors, strict=True):
        if not tensor.type.is_plain and (place.kind != "weight" or len(tensor.shape) == 1):
            raise other_file(f"{place.stored} is stored as {tensor.type.name}, but it is no matrix")
    kind = first.kind if is_plain or change.needs_numbers else BLOCKS
    return GgufWeight(f"{first.module}.{kind}" if kind else first.module, tuple(tensors), change)


def _experts(
    file: GgufFile, places: list[_Place], tensors: list[GgufTensor], change: Change
) -> Iterator[GgufWeight]:
    """Yield the stack of all experts, or the matrix of each where they stay codes."""
    num_experts = file.number("expert_count")
    num_dims = 3 if places[0].kind == "weight" else 2
    for place, tensor in zip(places, tensors, strict=True):
        if len(tensor.shape) != num_dims or tensor.shape[0] != num_experts or not num_experts:
            raise _other_file_or_form(
                f"{place.stored} is {list(tensor.shape)}, and not a stack of {num_experts} matrices"
            )
    if change.is_read_as_numbers or all(each.type.is_plain for each in tensors):
        if places[0].kind == "bias":
            yield GgufWeight(
                f"{places[0].module}_bias", tuple(tensors), replace(change, axis=1, transposed=())
            )
        else:
            axis = 2 if change.transposed else 1
            yield GgufWeight(places[0].module, tuple(tensors), replace(change, axis=axis))
        return
    module, _, _ = places[0].module.rpartition(".")
    for place, tensor in zip(places, tensors, strict=True):
        if tensor.type.is_plain:
            raise _other_file_or_form(
                f"{place.stored} is plain, and {places[0].stored} or another of its kind is not"
            )
        proj = place.part.removeprefix("ffn_").removesuffix(_STACK)
        for number, matrix in enumerate(tensor.matrices()):
            yield GgufWeight(f"{module}.{number}.{proj}_proj.{BLOCKS}", (matrix,), UNCHANGED)


def _predicts_further(file: GgufFile, stored: str) -> bool:
    """Tell whether a tensor is of a layer that predicts several tokens at once: no draft is taken from it."""
    layer = _LAYER.fullmatch(stored)
    return layer is not None and file.num_layers <= int(layer[1]) < file.number("block_count")


def _place_of(file: GgufFile, family: GgufFamily, stored: str) -> _Place:
    layer = _LAYER.fullmatch(stored)
    prefix, inner, names = "", stored, family.top
    if layer is not None and int(layer[1]) < file.num_layers:
        prefix, inner, names = f"model.layers.{layer[1]}.", layer[2], family.names
    part, dot, kind = inner.rpartition(".")
    if inner in names and (dot or inner == _BARE):
        return _Place(stored, f"{prefix}{names[inner]}", "", inner)
    if part in names and kind in (("weight", "bias") if prefix else ("weight",)):
        return _Place(stored, f"{prefix}{names[part]}", kind, part)
    raise _other_file_or_form(f"{stored} is no tensor that is known of the family {file.architecture}")
