"""The linear layers of a model that adapters can update, and the parts that compute them.

Owns: the search for them, by a call of the model that is watched: a layer whose call does not go through its
module, or that is given some of the tokens only, would leave an adapter out without a word.
Never: knows a family, or a device's kernels.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.adapters.adapted_linear import AdaptablePart, AdaptedLinear, StepAdapters
from worker.adapters.adapter_files import AdapterFiles, LowRank
from worker.model.linear import linear_of
from worker.worker_config import AdapterLimits
from worker.worker_errors import AdapterRefused


class LayerSize(NamedTuple):
    """Numbers of a linear layer."""

    num_outputs: int
    num_inputs: int


@dataclass(frozen=True, slots=True)
class Targets:
    """The layers that can be updated, by name, and the reasons why others cannot."""

    sizes: Mapping[str, LayerSize]
    reasons: Mapping[str, str]

    def num_numbers(self, rank: int) -> int:
        """Count the numbers of an adapter of this rank with an update for every layer."""
        return rank * sum(size.num_outputs + size.num_inputs for size in self.sizes.values())

    def num_bytes(self, limits: AdapterLimits, dtype: torch.dtype) -> int:
        """Size as many adapters as may be in memory, each with an update of the highest rank everywhere."""
        return self.num_numbers(limits.max_rank) * dtype.itemsize * limits.max_in_memory

    def check(self, files: AdapterFiles, *, max_rank: int) -> dict[str, LowRank]:
        """Match updates and layers both ways. Raises AdapterRefused with the name that has no other."""
        for name, update in files.updates.items():
            size = self.sizes.get(name)
            if size is None:
                why = self.reasons.get(name, "the model has no linear layer of this name")
                raise AdapterRefused(f"the tensors of {name} find no layer: {why}")
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
        for name in (*self.sizes, *(self.reasons if files.settings.targets is not None else ())):
            if files.settings.include(name) and name not in files.updates:
                raise AdapterRefused(f"{name} is a target of adapter_config.json and has no tensors")
        if not files.updates:
            raise AdapterRefused("it updates no layer")
        return files.updates


def find_targets(model: Any, run: Callable[[], object], *, num_tokens: int) -> Targets:
    """Watch `run`, a call of the model with so many tokens, before any layer is replaced."""
    output = model.get_output_embeddings()
    calls: Counter[str] = Counter()
    whole: set[str] = set()
    sizes, hooks = {}, []

    def note(name: str, args: tuple[Any, ...]) -> None:
        calls[name] += 1
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.numel() == num_tokens * x.shape[-1]:
            whole.add(name)

    for name, module in model.named_modules():
        linear = linear_of(module)
        if linear is not None:
            sizes[name] = LayerSize(linear.num_outputs, linear.num_inputs)
            hooks.append(module.register_forward_pre_hook(lambda _, args, name=name: note(name, args)))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    reasons = {}
    for name in sizes:
        if model.get_submodule(name) is output:
            reasons[name] = "updates of the output layer are not computed"
        elif name not in calls:
            reasons[name] = "the model does not call it by itself"
        elif calls[name] > 1 or name not in whole:
            reasons[name] = "the model does not call it once with all tokens"
    return Targets({name: size for name, size in sizes.items() if name not in reasons}, reasons)


def adaptable_parts(
    model: nn.Module, targets: Targets, step: StepAdapters, num_slots: int
) -> list[AdaptablePart]:
    """Make every target computable, after layers were replaced. Returns the parts that compute them.

    A target that is still a module is wrapped; of a layer that was replaced, the layer's own parts take it.
    """
    parts: list[AdaptablePart] = []
    for layer_name, layer in list(model.named_modules()):
        adapt = getattr(layer, "adapt", None)
        if adapt is not None:
            parts += adapt(layer_name, step, num_slots)
    for name in set(targets.sizes).difference(*(part.adapted_names() for part in parts)):
        wrapped = AdaptedLinear(name, model.get_submodule(name), step)
        model.set_submodule(name, wrapped)
        parts.append(wrapped)
    return parts
