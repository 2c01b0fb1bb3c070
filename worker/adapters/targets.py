"""The linear layers of a model that adapters can update, and the parts that compute them.

Owns: the search for them, by a call of the model that is watched: a layer whose call does not go through its
module, or that is given some of the tokens only, would leave an adapter out without a word.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.adapters.adapted_linear import AdaptablePart, StepAdapters, adapt_linear
from worker.adapters.experts import AdaptedExperts, ExpertsSize, check_modules, size_experts
from worker.adapters.files import FILE_BYTES_OF_A_NUMBER, AdapterFiles, LowRank, read_adapter
from worker.attention.indexers import INDEXER
from worker.attention.latents import LatentExpansion
from worker.checkpoint.passed_over import is_of_tower, is_passed_over
from worker.checkpoint.task import Task
from worker.model.layer_parts import Unrecognised
from worker.model.linear import linear_of
from worker.model.mixture import find_experts, read_experts
from worker.model.stage_layers import places_before
from worker.worker_config import AdapterLimits
from worker.worker_errors import AdapterRefused, refused_as

log = logging.getLogger(__name__)

_LAYERS = re.compile(r"(?:(?:model|language_model|text_model)\.)*layers\.")
"""The text class of a family has `model.layers.`, the whole one `model.language_model.layers.`"""
_TIMES_WITH_TOWERS = 2
"""Room for updates of towers in the files of an adapter, which are read and left out."""


class LayerSize(NamedTuple):
    """Numbers of a linear layer."""

    num_outputs: int
    num_inputs: int


class AdapterContent(NamedTuple):
    """Content of an adapter that was read."""

    digest: str
    updates: dict[str, LowRank]
    is_of_tower: bool
    """Whether it also updates a tower whose outputs are served, which is not computed."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The layers that can be updated, by name, and the reasons why others cannot."""

    sizes: Mapping[str, LayerSize]
    """Linear layers, and those of each expert."""
    reasons: Mapping[str, str]
    experts: Mapping[str, ExpertsSize]
    """Mixtures, whose linear layers are in `sizes`."""
    reads_pictures: bool = False
    """Whether outputs of towers are served."""

    def without_latents(self, model: nn.Module, why: str) -> "Targets":
        """Leave products that expand latents out, for this reason."""
        expansions = {name for name, module in model.named_modules() if isinstance(module, LatentExpansion)}
        names = expansions & self.sizes.keys()
        sizes = {name: size for name, size in self.sizes.items() if name not in names}
        return Targets(sizes, {**self.reasons, **dict.fromkeys(names, why)}, self.experts)

    def without_experts(self, why: str) -> "Targets":
        """Leave mixtures out, for this reason."""
        of_experts = {layer for name, size in self.experts.items() for layer in size.layers(name)}
        sizes = {name: size for name, size in self.sizes.items() if name not in of_experts}
        return Targets(sizes, {**self.reasons, **dict.fromkeys(self.experts, why)}, {})

    def num_numbers(self, rank: int) -> int:
        """Count the numbers of an adapter of this rank with an update for every layer."""
        return rank * sum(size.num_outputs + size.num_inputs for size in self.sizes.values())

    def num_bytes(self, limits: AdapterLimits, dtype: torch.dtype) -> int:
        """Size as many adapters as may be in memory, each with an update of the highest rank everywhere."""
        return self.num_numbers(limits.max_rank) * dtype.itemsize * limits.max_in_memory

    def read(self, folder: Path, *, max_rank: int) -> AdapterContent:
        """Read the files of an adapter. Raises AdapterRefused only."""
        with refused_as(AdapterRefused, f"the folder {folder.name}"):
            max_bytes = self.num_numbers(max_rank) * FILE_BYTES_OF_A_NUMBER * _TIMES_WITH_TOWERS
            files = read_adapter(folder, max_bytes=max_bytes)
            unused = [name for name in files.halves if self._is_unused(name)]
            if unused:
                log.info(
                    "adapter in %s: updates of %d modules change no text and are left out, %s first",
                    folder,
                    len(unused),
                    unused[0],
                )
            of_tower = self.reads_pictures and any(map(is_of_tower, unused))
            return AdapterContent(files.digest, self.check(files, max_rank=max_rank), of_tower)

    def _is_unused(self, name: str) -> bool:
        """Tell whether a layer is one of a tower or a draft head, which no text depends on."""
        return name not in self.sizes and is_passed_over(
            f"{name}.weight", draft_layers=(), task=Task.GENERATE
        )

    def check(self, files: AdapterFiles, *, max_rank: int) -> dict[str, LowRank]:
        """Match updates and layers both ways. Raises AdapterRefused with the name that has no other.

        The model may be the text class or the whole one of its family, and the adapter the other's.
        """
        here, there = _before_layers(self.sizes), _before_layers(files.halves)
        if here is not None and there is not None and here != there:
            files = files.renamed(here, there)
        updates = self._updates_of(files)
        for name, update in updates.items():
            size = self.sizes[name]
            if (update.up_NR.shape[0], update.down_RK.shape[1]) != size:
                raise AdapterRefused(
                    f"the tensors of {name} are for {update.down_RK.shape[1]} inputs and "
                    f"{update.up_NR.shape[0]} outputs, "
                    f"and the layer has {size.num_inputs} and {size.num_outputs}"
                )
            if update.rank > max_rank:
                raise AdapterRefused(
                    f"{name} has rank {update.rank}, and --max-lora-rank allows {max_rank} at most"
                )
        of_experts = {layer for name, size in self.experts.items() for layer in size.layers(name)}
        for name in (*self.sizes, *(self.reasons if files.settings.targets is not None else ())):
            is_target = files.settings.include(name) or files.settings.name_of(name) != name
            if is_target and not (name in of_experts or name in updates or self._is_unused(name)):
                raise AdapterRefused(f"{name} is a target of adapter_config.json and has no tensors")
        if not updates:
            raise AdapterRefused("it updates no layer")
        return updates

    def _updates_of(self, files: AdapterFiles) -> dict[str, LowRank]:
        """Give each tensor to its layer. Raises AdapterRefused for one that is left."""
        halves, updates = dict(files.halves), dict[str, LowRank]()
        check_modules(self.experts, halves, files.settings)
        for name, size in self.experts.items():
            updates |= size.take_all(name, halves, files.settings)
        for name, both in halves.items():
            if self._is_unused(name):
                continue
            if name not in self.sizes:
                why = self.reasons.get(name, "the model has no linear layer of this name")
                raise AdapterRefused(f"the tensors of {name} find no layer: {why}")
            updates[name] = both.low_rank(files.settings.name_of(name), files.settings)
        return updates


def _before_layers(names: Iterable[str]) -> str | None:
    """Return the beginning of the names of the language model's layers, `layers.` with it."""
    found = {match.group() for name in names if (match := _LAYERS.match(name)) is not None}
    return max(found, key=len, default=None)


def find_targets(model: Any, run: Callable[[], object], *, num_tokens: int) -> Targets:
    """Watch `run`, a call of the model with `num_tokens`, before any layer is replaced."""
    output = model.get_output_embeddings()
    sizes, experts = {}, {}
    for name, module in model.named_modules():
        linear = linear_of(module)
        if linear is not None:
            sizes[name] = LayerSize(linear.num_outputs, linear.num_inputs)
    reasons = {}
    for name, module in find_experts(model):
        try:
            experts[name] = size_experts(module)
        except Unrecognised as unusual:
            reasons[name] = str(unusual)
    calls, whole = _watch(model, {*sizes, *experts}, run, num_tokens)
    for name in (*sizes, *experts):
        if model.get_submodule(name) is output:
            reasons[name] = "updates of the output layer are not computed"
        elif name not in calls:
            reasons[name] = "the model does not call it by itself"
        elif calls[name] > 1 or name not in whole:
            reasons[name] = "the model does not call it once with all tokens"
    experts = {name: size for name, size in experts.items() if name not in reasons}
    sizes = {name: size for name, size in sizes.items() if name not in reasons}
    sizes |= {
        name: LayerSize(*module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, LatentExpansion)  # which attention multiplies by, for all tokens at once
    }
    for name, size in experts.items():
        sizes |= {layer: LayerSize(*of_layer) for layer, of_layer in size.layers(name).items()}
    return Targets(sizes, reasons, experts)


def _watch(
    model: nn.Module, names: set[str], run: Callable[[], object], num_tokens: int
) -> tuple[Counter[str], set[str]]:
    """Count the calls of modules, and find those that are given all tokens."""
    calls: Counter[str] = Counter()
    whole: set[str] = set()

    def note(name: str, args: tuple[Any, ...]) -> None:
        calls[name] += 1
        x = args[0] if args else None
        if f".{INDEXER}." in name:
            return  # once there are several sequences, it is called for each
        if isinstance(x, Tensor) and x.numel() == num_tokens * x.shape[-1]:
            whole.add(name)

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: note(name, args))
        for name in names
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls, whole


class AdapterWay(NamedTuple):
    """The way in which a device computes updates."""

    step: StepAdapters
    wrap: Callable[[str, nn.Module, Any, int], Any]
    """Put a module with updates, an AdaptablePart, around a linear layer that is none of a fused layer's; it
    is given the layer's name, the layer, `step` and the number of slots."""


def in_torch() -> AdapterWay:
    """Compute updates in torch, where no kernel does."""
    return AdapterWay(StepAdapters(), adapt_linear)


def adaptable_parts(
    model: nn.Module, targets: Targets, way: AdapterWay, num_slots: int
) -> list[AdaptablePart]:
    """Make every target computable, after layers were replaced. Returns the parts that compute them.

    A target that is still a module is wrapped; of a layer that was replaced, the layer's own parts take it.
    Targets in layers of other stages are theirs.
    """
    parts: list[AdaptablePart] = []
    places = places_before(model)
    for name, place in places.items():
        adapt = getattr(model.get_submodule(place), "adapt", None)
        if adapt is not None:
            parts += adapt(name, way.step, num_slots)
    missing = set(targets.sizes).difference(*(part.adapted_names() for part in parts))
    for name, size in targets.experts.items():
        of_experts = set(size.layers(name))
        if of_experts <= missing and name in places:
            module = model.get_submodule(places[name])
            experts = AdaptedExperts(name, module, read_experts(module), way.step)
            model.set_submodule(places[name], experts)
            parts.append(experts)
        missing -= of_experts
    for name in missing & places.keys():
        wrapped = way.wrap(name, model.get_submodule(places[name]), way.step, num_slots)
        model.set_submodule(places[name], wrapped)
        parts.append(wrapped)
    return parts
