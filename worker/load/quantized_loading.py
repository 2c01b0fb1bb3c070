"""Quantized checkpoints into transformers' models: which module takes which stored weight, and taking it.

Owns: the way from the names of tensors to modules, by transformers' own renamings; the modules that stand in
for linear layers and experts; and the refusal of everything that would not be computed exactly.
"""

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from worker.checkpoint.checkpoint_files import StoredTensor, WeightFile, module_of
from worker.checkpoint.gguf.file import BLOCKS
from worker.checkpoint.task import Task
from worker.load.stored_weights import (
    MergedLinear,
    StoredLinear,
    StoredModule,
    StoredStack,
    other_checkpoint,
    read_merged,
)
from worker.machine import trim_heaps
from worker.model.mixture import declares_layout
from worker.model.quantized_layers import (
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    declare_layout,
    experts_for,
)
from worker.quantized.grouped_weight import GroupedWeight
from worker.quantized.scheme import (
    QuantizationRefused,
    Reader,
    Rules,
    find_reader,
    is_bias,
)
from worker.quantized.tensor_places import TensorPlaces, TensorTarget

log = logging.getLogger(__name__)

_METHOD = "tokenyard"
_TRIM_EVERY = 16
"""Weights after which the memory that reading them took is given back; the next ones would take it again."""
_NUMBER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"(?P<module>.+)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|gate_up_proj|down_proj)")
"""An expert's matrix that is named by the model's own module of experts, as GGUF files have it here, and
others where the family keeps all in one tensor."""
_MATRIX_DIMS = 2
_STEP_SIZES = "dt_proj"
"""Name of Mamba's linear layer whose weight the code of families multiplies by itself. It is small."""
_StackShape = tuple[int, int, int]


@dataclass(slots=True)
class QuantizedModules:
    """The quantized modules of a checkpoint: found before a model is built, put into it, filled after."""

    rules: Rules
    stored: dict[str, StoredModule]
    linears: dict[str, StoredLinear | MergedLinear] = field(default_factory=dict)
    """Linear layers by the name of the model's module."""
    parts: dict[str, dict[int, StoredLinear]] = field(default_factory=dict)
    """Layers of the files that are merged into a linear layer of the model, by its name and their place."""
    experts: dict[str, dict[tuple[int, str, int], StoredLinear]] = field(default_factory=dict)
    """Experts by the name of the model's module; then by expert, parameter and place in it."""
    embeddings: dict[str, StoredLinear] = field(default_factory=dict)
    """Embeddings by the name of the model's module."""
    numbers: dict[str, StoredLinear] = field(default_factory=dict)
    """Other modules with such a weight, routers for example, by the name of the model's module: their codes
    are made numbers at load."""
    stacked: dict[str, tuple[StoredStack, StoredStack]] = field(default_factory=dict)
    """Stacks of experts by the name of the model's module, of gates and ups, and of downs."""
    tied: str | None = None
    """The embedding whose weight the output layer has, if it is one of codes."""
    places: TensorPlaces | None = None
    """TensorPlaces in the model as it was before modules were put into it."""

    def replace(self, model: Any) -> None:
        """Put modules without weights into a model without content. Raises QuantizationRefused."""
        self.places = names = TensorPlaces(model)
        for stored in self.stored.values():
            if stored.has_stacks:
                self._take_stacked(model, names, stored)
            else:
                self._take_linear(model, names, stored)
        self._merge_parts(model)
        mixtures = (*self.experts, *self.stacked)
        if not (self.linears or self.embeddings or self.numbers or mixtures):
            log.warning("config.json has a quantization_config, and no weight is of codes: it has no effect")
        for name in self.linears:
            model.set_submodule(name, QuantizedLinear(model.get_submodule(name)))
        if isinstance(model.get_output_embeddings(), QuantizedLinear):
            model.all_tied_weights_keys = {}  # codes of its own, whatever config.json says
        for name in mixtures:
            model.set_submodule(name, experts_for(model.get_submodule(name)))
        for name in self.embeddings:
            self._replace_embedding(model, name)
        if self.numbers:
            log.info(
                "codes of %d modules are made numbers at load, %s first: the family's code reads them",
                len(self.numbers),
                next(iter(self.numbers)),
            )

    def _replace_embedding(self, model: Any, name: str) -> None:
        """Replace an embedding, and the output layer that is tied to it: neither has a weight to tie then."""
        embedding, output = model.get_submodule(name), model.get_output_embeddings()
        is_first = embedding is model.get_input_embeddings()
        is_tied = is_first and _ties_output(model) and not isinstance(output, QuantizedLinear | None)
        try:
            model.set_submodule(name, QuantizedEmbedding(embedding))
        except ValueError as error:
            raise other_checkpoint(f"{name} is quantized, but {error}") from error
        if is_tied:
            self.tied = name
            model.set_output_embeddings(QuantizedLinear(output))
            model.all_tied_weights_keys = {}

    def fill(self, model: Any, device: torch.device) -> None:
        """Read all weights, each in its turn, onto the device. Raises QuantizationRefused."""
        for name, embedding in self.embeddings.items():
            weight = embedding.read().to(device)
            model.get_submodule(name).fill(weight)
            if name == self.tied:
                model.get_output_embeddings().fill(weight)
        for name, codes in self.numbers.items():
            parameter = model.get_submodule(name).weight
            parameter.data.copy_(codes.read().dequantized(parameter.dtype))
        # The largest first: reading takes memory of its own, and at first there is most of it.
        by_size = sorted(self.linears.items(), key=lambda each: -math.prod(each[1].shape))
        for place, (name, linear) in enumerate(by_size):
            if place % _TRIM_EVERY == 0:
                trim_heaps()
            model.get_submodule(name).fill(linear.read().to(device))
        for name, parts in self.experts.items():
            module: QuantizedExperts = model.get_submodule(name)
            stacks = _read_parts(name, parts, module)
            module.fill(*([each.to(device) for each in stack] for stack in stacks))
        for name, both in self.stacked.items():
            model.get_submodule(name).fill(*([each.to(device) for each in stack.read()] for stack in both))

    def expand(self, model: Any, name: str) -> None:
        """Put a plain linear layer in the place of one of codes, for good."""
        if self.linears.pop(name, None) is None:
            return
        module: QuantizedLinear = model.get_submodule(name)
        plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        weight_NK = module.weight_codes.dequantized(model.dtype)
        plain.weight, plain.bias = nn.Parameter(weight_NK, requires_grad=False), module.bias
        model.set_submodule(name, plain)

    def names_taken(self) -> set[str]:
        """List the tensors that readers take, or refuse, by their names in the files."""
        experts = (each for parts in self.experts.values() for each in parts.values())
        parts = (each for merged in self.parts.values() for each in merged.values())
        whole = [each for each in self.linears.values() if isinstance(each, StoredLinear)]
        linears = [*whole, *self.embeddings.values(), *self.numbers.values(), *experts, *parts]
        stacks = (stack for both in self.stacked.values() for stack in both)
        return {
            f"{each.stored.module}.{name}"
            for each in linears
            for name in each.stored.last_names
            if not is_bias(name)
        } | {f"{stack.stored.module}.{name}" for stack in stacks for name in stack.files}

    def free(self, model: Any) -> None:
        """Free the weights of linear layers, which are read again once they are asked for."""
        for name, linear in self.linears.items():
            model.get_submodule(name).read_when_asked(linear.read)

    def keep(self, model: Any) -> None:
        """Read those of them that nothing has replaced meanwhile, once and for all."""
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.keep()

    def weights_of(self, model: Any) -> list[GroupedWeight]:
        """List all weights of a model that was filled."""
        found = [model.get_submodule(name).weight_codes for name in (*self.linears, *self.embeddings)]
        for name in (*self.experts, *self.stacked):
            found += model.get_submodule(name).weights
        return found

    def _take_linear(self, model: Any, names: TensorPlaces, stored: StoredModule) -> None:
        """Find the reader of a module's weight; tensors of no module are the matter of TensorPlaces.check."""
        module_name = stored.place or stored.module
        expert = _EXPERT.fullmatch(module_name)
        is_of_gguf = expert is not None and BLOCKS in stored.last_names
        target = None if is_of_gguf else names.find(f"{module_name}.weight")
        if target is None:
            if expert is not None:
                self._take_expert(model, names, stored, expert)
            return
        module = model.get_submodule(target.module)
        reader = find_reader(self.rules, stored.module, stored.last_names)
        if reader is None:
            return
        if target.converter is not None and type(module) is nn.Linear:
            self._take_part(stored, reader, target, model)
            return
        if target.converter is not None:
            place = _place_of_expert(stored, target, module)
            shape = _shape_of_expert(stored, target, module)
            linear = StoredLinear(stored, reader, model.dtype, shape)
            self.experts.setdefault(target.module, {})[place] = linear
            return
        if not isinstance(module, nn.Linear | nn.Embedding) and not _multiplies_rows(module):
            raise other_checkpoint(f"{stored.module} is quantized, but it is a {type(module).__name__}")
        num_outputs, num_inputs = module.weight.shape
        linear = StoredLinear(stored, reader, model.dtype, (num_outputs, num_inputs))
        if isinstance(module, nn.Embedding):
            self.embeddings[target.module] = linear
        elif type(module) is nn.Linear and target.module.rpartition(".")[2] != _STEP_SIZES:
            self.linears[target.module] = linear
        else:
            self.numbers[target.module] = linear

    def _take_part(self, stored: StoredModule, reader: Reader, target: TensorTarget, model: Any) -> None:
        """Take outputs that follow on those of other layers. Raises QuantizationRefused for other merges."""
        operations, num_parts = target.converter.operations, len(target.converter.source_patterns)
        num_outputs, num_inputs = model.get_submodule(target.module).weight.shape
        if [(type(each), each.dim) for each in operations] != [(Concatenate, 0)] or num_outputs % num_parts:
            raise _refused_merge(stored)
        linear = StoredLinear(stored, reader, model.dtype, (num_outputs // num_parts, num_inputs))
        place = target.converter.source_patterns.index(target.source)
        self.parts.setdefault(target.module, {})[place] = linear

    def _merge_parts(self, model: Any) -> None:
        for name, parts in self.parts.items():
            num_outputs, num_inputs = model.get_submodule(name).weight.shape
            first = parts[min(parts)]
            if len(parts) * first.shape[0] != num_outputs:
                raise other_checkpoint(
                    f"{first.stored.module} is quantized, and other parts of {name} are not"
                )
            in_order = tuple(parts[place] for place in sorted(parts))
            self.linears[name] = MergedLinear(in_order, (num_outputs, num_inputs))

    def _take_expert(
        self, model: Any, names: TensorPlaces, stored: StoredModule, expert: re.Match[str]
    ) -> None:
        parameter = "down_proj" if expert["part"] == "down_proj" else "gate_up_proj"
        target = names.find(f"{expert['module']}.{parameter}")
        if target is None:
            return
        module = model.get_submodule(target.module)
        reader = find_reader(self.rules, stored.module, stored.last_names)
        if reader is None:
            return
        _require_layout(stored, module)
        _, num_outputs, num_inputs = _stack_shape(module, parameter)
        num_parts = 2 if expert["part"] in ("gate_proj", "up_proj") else 1
        place = (int(expert["number"]), parameter, int(expert["part"] == "up_proj"))
        linear = StoredLinear(stored, reader, model.dtype, (num_outputs // num_parts, num_inputs))
        self.experts.setdefault(target.module, {})[place] = linear

    def _take_stacked(self, model: Any, names: TensorPlaces, stored: StoredModule) -> None:
        """Take stacks whose codes lie as the numbers do in the model's parameter, or with inputs first."""
        target = names.find(f"{stored.place or stored.module}.down_proj")
        if target is None:
            return
        module, reader = model.get_submodule(target.module), self.rules.reader_of(stored.module)
        _require_layout(stored, module)
        operations = () if target.converter is None else target.converter.operations
        is_known = all(type(operation) is Transpose for operation in operations)
        if reader is None or not is_known:
            raise _refused_merge(stored)
        stacks = []
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            shape = _stack_shape(module, name)
            # transformers leaves a parameter as it is that has the shape of the model's already.
            is_turned = module.is_transposed or any(
                shape[1] != shape[2] or not operation.check_dims for operation in operations
            )
            if is_turned or operations:
                is_turned = _has_inputs_first(stored, name, shape[1], otherwise=is_turned)
            stacks.append(StoredStack(stored, reader, model.dtype, name, shape, is_turned))
        self.stacked[target.module] = stacks[0], stacks[1]


def find_quantized(rules: Rules, files: Sequence[WeightFile]) -> QuantizedModules:
    """Find the modules of a checkpoint that may be quantized."""
    return QuantizedModules(rules, group_by_module(files))


def group_by_module(files: Sequence[WeightFile]) -> dict[str, StoredModule]:
    """Group the tensors of files by module."""
    paths: dict[str, dict[str, Path]] = defaultdict(dict)
    places: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for file in files:
        for name, tensor in file.tensors.items():
            module, last_name = module_of(name)
            paths[module][last_name], places[module][last_name] = file.path, tensor
    return {name: StoredModule(name, paths[name], places[name]) for name in paths}


def refuse_unplaced(
    model: Any, modules: QuantizedModules | None, files: Sequence[WeightFile], task: Task
) -> None:
    """Raise StartupError for a tensor that would change results, and that nothing would read."""
    if modules is None:
        TensorPlaces(model).check(files, (), task)
    else:
        assert modules.places is not None
        modules.places.check(files, modules.names_taken(), task)


@register_quantization_config(_METHOD)
class _OurConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Stands for the modules while transformers builds a model."""

    def __init__(self, modules: QuantizedModules) -> None:
        self.quant_method = _METHOD
        self.modules = modules

    def __deepcopy__(self, _: Any) -> "_OurConfig":
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method}


@register_quantizer(_METHOD)
class _OurQuantizer(HfQuantizer):  # type: ignore[misc]
    """The calls that transformers makes before and after it loads the weights of a model."""

    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self.quantization_config.modules.replace(model)
        # Tensors that the files hold for the modules above; each of them was looked at.
        model._keys_to_ignore_on_load_unexpected = {"."}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        self.remove_quantization_config(model)
        for module in model.modules():  # by which Mamba's families would call layers in another way
            vars(getattr(module, "config", module)).pop("_is_quantized", None)


def without_quantization(model_config: Any) -> Any:
    """The same config of a model, of which transformers would build it with plain weights."""
    for config in (model_config, model_config.get_text_config(decoder=True)):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    return model_config


def arguments_of(modules: QuantizedModules | None) -> dict[str, Any]:
    """Name the further arguments of from_pretrained that leave these modules to us."""
    return {} if modules is None else {"quantization_config": _OurConfig(modules)}


def _place_of_expert(stored: StoredModule, target: TensorTarget, module: Any) -> tuple[int, str, int]:
    """Return expert, parameter and place in it. Raises QuantizationRefused for other ways to merge."""
    operations = {type(operation) for operation in target.converter.operations}
    numbers = _NUMBER.findall(f".{stored.module}.")
    is_known = MergeModulelist in operations and operations <= {MergeModulelist, Concatenate}
    _require_layout(stored, module)
    if not is_known or module.is_transposed or not numbers:
        raise _refused_merge(stored)
    return int(numbers[-1]), target.parameter, target.converter.source_patterns.index(target.source)


def _require_layout(stored: StoredModule, module: nn.Module) -> None:
    """Raise QuantizationRefused for experts that a family computes by itself, as LongCat, or with norms."""
    declare_layout(module)
    if not declares_layout(module) or module.has_post_expert_norm:
        raise QuantizationRefused(
            f"{stored.module} is quantized, and {type(module).__name__} computes plain experts only",
            fix="take a checkpoint whose experts are plain",
        )


def _refused_merge(stored: StoredModule) -> QuantizationRefused:
    return other_checkpoint(
        f"{stored.module} is quantized, and this family cuts or merges it in a way that codes cannot be"
    )


def _stack_shape(module: Any, parameter: str) -> _StackShape:
    """Experts, outputs and inputs of all weights in one parameter."""
    num_experts, rows, columns = getattr(module, parameter).shape
    return (num_experts, columns, rows) if module.is_transposed else (num_experts, rows, columns)


def _has_inputs_first(stored: StoredModule, parameter: str, num_outputs: int, *, otherwise: bool) -> bool:
    """Tell whether codes have inputs before outputs; `otherwise` where both are as many."""
    codes = stored.places.get(parameter) or stored.places.get(f"{parameter}_packed")
    sizes = () if codes is None else codes.shape[1:]
    return otherwise if len(set(sizes)) == 1 else sizes[-1:] == (num_outputs,)


def _shape_of_expert(stored: StoredModule, target: TensorTarget, module: Any) -> tuple[int, int]:
    _, num_outputs, num_inputs = getattr(module, target.parameter).shape
    num_parts = len(target.converter.source_patterns)
    if num_outputs % num_parts:
        raise other_checkpoint(f"{stored.module} has no whole share of an expert")
    return num_outputs // num_parts, num_inputs


def _read_parts(
    name: str, parts: dict[tuple[int, str, int], StoredLinear], module: QuantizedExperts
) -> tuple[list[GroupedWeight], list[GroupedWeight]]:
    """Read the experts that are stored one by one. Raises QuantizationRefused."""
    per_parameter: dict[tuple[int, str], list[StoredLinear]] = defaultdict(list)
    for expert, parameter, place in sorted(parts):
        per_parameter[expert, parameter].append(parts[expert, parameter, place])
    most = Counter({parameter: len(found) for (_, parameter), found in per_parameter.items()})

    def stack(parameter: str) -> list[GroupedWeight]:
        stacked = []
        for expert in range(module.num_experts):
            found = per_parameter[expert, parameter]
            if len(found) != most[parameter] or not found:
                raise other_checkpoint(
                    f"{name} has experts that are quantized, but {parameter} of number {expert} is not"
                )
            weight = read_merged(found)
            stacked.append(weight if len(found) == 1 or module.is_concatenated else _interleaved(weight))
        return stacked

    return stack(module.first_parameter), stack("down_proj")


def _ties_output(model: Any) -> bool:
    """Tell whether the output layer has the embedding's weight: transformers asks the whole configuration."""
    return bool(getattr(model.config, "tie_word_embeddings", False))


def _multiplies_rows(module: nn.Module) -> bool:
    """Tell whether a module has a weight of outputs and inputs, in this order."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == _MATRIX_DIMS and not isinstance(module, Conv1D)


def _interleaved(weight: GroupedWeight) -> GroupedWeight:
    """Put each gate of an expert next to its up."""
    return weight.outputs(torch.arange(weight.num_outputs).view(2, -1).T.reshape(-1))
