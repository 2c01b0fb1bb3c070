"""TensorPlaces of stored tensors in a transformers model, and the refusal of tensors that have none.

Owns: the way from a checkpoint's names to the model's, by transformers' own renamings, and the comparison of
what the files hold with what the model takes.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from worker.checkpoint.checkpoint_files import StoredTensor, WeightFile, module_of
from worker.checkpoint.passed_over import draft_layers_in, is_passed_over
from worker.checkpoint.task import Task
from worker.quantized.scheme import MARKERS
from worker.worker_errors import StartupError

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """The place of a stored weight in a model."""

    module: str
    parameter: str
    converter: Any = None
    """transformers' recipe for a parameter that is made of several; None: it is taken as it is."""
    source: str | None = None
    """The pattern of names among the recipe's that this weight has."""


class TensorPlaces:
    """Map of names in a checkpoint to the model's, as transformers would load them."""

    def __init__(self, model: Any) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._parameters = model.state_dict()
        self._family_ignores = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
        text_config = model.config.get_text_config(decoder=True)
        self._num_layers: float = getattr(text_config, "num_hidden_layers", None) or math.inf
        self._class_name = type(model).__name__

    def find(self, name: str) -> TensorTarget | None:
        """Return None where the model has no such parameter."""
        renamed, source = self._rename(name)
        if renamed not in self._parameters:
            return None
        module, _, parameter = renamed.rpartition(".")
        converter = next((each for each in self._converters if source in each.source_patterns), None)
        return TensorTarget(module, parameter, converter if source else None, source)

    def _rename(self, name: str) -> tuple[str, str | None]:
        renamed, source = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._parameters
        )
        if renamed not in self._parameters and name in self._parameters:
            return name, None
        return renamed, source

    def check(self, files: Sequence[WeightFile], taken: Collection[str], task: Task) -> None:
        """Raise StartupError for what would be dropped, or taken for numbers that it is not.

        `taken` are the names of tensors that readers of quantized weights take.
        """
        draft_layers = draft_layers_in((name for file in files for name in file.tensors), self._num_layers)
        is_dropped = partial(is_passed_over, draft_layers=draft_layers, task=task)
        for file in files:
            faults = [
                (name, fault)
                for name, tensor in sorted(file.tensors.items())
                if name not in taken and (fault := self._fault(name, tensor, is_dropped)) is not None
            ]
            zeros = _zero_biases(file, [name for name, _ in faults])
            found = [(name, fault) for name, fault in faults if name not in zeros]
            # What tells of a quantization says more than what follows from it.
            for name, fault in sorted(found, key=lambda each: module_of(each[0])[1] not in MARKERS):
                raise StartupError(
                    f"{file.path.parent}: {name} {fault}",
                    fix="take a checkpoint whose config and tensors agree",
                )

    def _fault(self, name: str, tensor: StoredTensor, is_dropped: Callable[[str], bool]) -> str | None:
        renamed = name if name in self._parameters else self._rename(name)[0]
        if renamed in self._parameters:
            is_misread = tensor.gguf is None and tensor.dtype not in _FLOATS
            if is_misread and self._parameters[renamed].is_floating_point():
                return f"holds codes ({tensor.dtype}), and config.json does not say how they are to be read"
            return None
        if any(each.search(renamed) for each in self._family_ignores):
            return None
        if is_dropped(name):
            return None
        if module_of(name)[1] in MARKERS:
            return (
                f"is part of a quantized weight, and config.json does not say how it is to be read, or "
                f"{self._class_name} has no layer there"
            )
        if name.endswith("bias"):
            return f"is a bias that is not 0, and {self._class_name} has none there by its configuration"
        return f"has no place in {self._class_name}"


def _zero_biases(file: WeightFile, names: Sequence[str]) -> set[str]:
    """Names of biases that are all 0, which older writers of GPTQ add."""
    biases = [name for name in names if name.endswith("bias") and file.tensors[name].gguf is None]
    if not biases:
        return set()
    with safe_open(file.path, framework="pt") as stored:
        return {name for name in biases if not stored.get_tensor(name).any()}
