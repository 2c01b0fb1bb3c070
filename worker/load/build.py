"""Build of the class that transformers has for a checkpoint's family and task, with its plain weights.

Owns: the registration of the worker's attention in transformers, and the errors of its loader in plain words.
Never: takes code from the checkpoint (auto_map is not followed), pickled weights, or anything from the
network.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
)
from transformers.utils import logging as transformers_logging

from worker.attention.indexers import keep_index_keys
from worker.attention.interface import ATTENTION_NAME, attention_forward
from worker.attention.latents import find_expansions, keep_latents
from worker.checkpoint.checkpoint_files import WeightFile, read_json
from worker.checkpoint.task import Task
from worker.checkpoint.task_choice import generating_class
from worker.devices.lazy_imports import load_shapes
from worker.devices.trial import first_line
from worker.devices.weight_life import is_out_of_memory
from worker.load.model_kind import (
    NO_PAGED_ATTENTION,
    ModelKind,
    dtype_name,
    model_config_of,
    refuse_layers,
    torch_dtype,
)
from worker.load.quantized_loading import (
    QuantizedModules,
    arguments_of,
    find_quantized,
    refuse_unplaced,
    without_quantization,
)
from worker.load.recurrent_functions import knows_recurrence, replace_functions
from worker.quantized.gguf_blocks import numbers_of
from worker.worker_errors import FamilyRefused, StartupError, refused_as

_MOST_REASON_CHARS = 200
_CHECK_IT = "check the checkpoint with AutoModelForCausalLM.from_pretrained"
# A head for the training of encoders: its output is never read, and many checkpoints leave it out.
_POOLER = "pooler."

AttentionInterface.register(ATTENTION_NAME, attention_forward)


def build_model(kind: ModelKind, dtype: str, files: list[WeightFile]) -> tuple[Any, QuantizedModules | None]:
    """Build the model with its plain weights; those of quantized modules are yet to be filled in.

    Raises StartupError for what cannot be served.
    """
    modules = None if kind.quantization is None else find_quantized(kind.quantization, files)
    _quieten()
    state = _read_state(files, torch_dtype(dtype, kind))
    is_of_files = state is None and dtype_name(dtype, kind.checkpoint_config) is None
    with in_plain_words(kind.folder):
        model_config = model_config_of(kind, files)
        _refuse_layers(kind, model_config)
        model, loading = from_pretrained(
            _class_of(kind, model_config, state),
            kind.folder if state is None else None,
            config=without_quantization(model_config),
            dtype=dtype if is_of_files else torch_dtype(dtype, kind),
            attn_implementation=ATTENTION_NAME if kind.is_paged else None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **arguments_of(modules),
            **({} if state is None else {"state_dict": state}),
        )
    replace_functions(model)
    refuse_unplaced(model, modules, files, kind.task)
    is_filled_later = set() if modules is None else {f"{name}.weight" for name in modules.numbers}
    refuse_mismatched(
        kind.folder, [each for each in loading["mismatched_keys"] if each[0] not in is_filled_later]
    )
    missing = [name for name in loading["missing_keys"] if not name.startswith(_POOLER)]
    _refuse_missing(kind.folder, model, sorted({*missing} - is_filled_later), files)
    return model, modules


def _read_state(files: Sequence[WeightFile], dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Read the plain weights of a GGUF file by the model's names; None for other files.

    Codes that become numbers are rounded to `dtype`, each weight before the next is read.
    """
    state = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if tensor.gguf is None:
                return None
            if not tensor.gguf.has_codes:
                refusal = partial(StartupError, fix="take another GGUF file")
                with refused_as(refusal, f"{file.path}: {name}", but=(MemoryError,)):
                    numbers = numbers_of(tensor.gguf)
                    is_plain = all(each.type.is_plain for each in tensor.gguf.tensors)
                    state[name] = numbers if is_plain else numbers.to(dtype)
    return state


@contextmanager
def in_plain_words(folder: Path) -> Iterator[None]:
    """Raise StartupError or FamilyRefused for what transformers raises."""
    try:
        yield
    except KeyError as error:
        if ATTENTION_NAME in error.args:  # the class looks attention up in a table of its own
            model_type = read_json(folder / "config.json").get("model_type")
            raise FamilyRefused(f"{model_type} {NO_PAGED_ATTENTION}") from error
        raise StartupError(f"transformers cannot load {folder}: KeyError {error}", fix=_CHECK_IT) from error
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())[:_MOST_REASON_CHARS]
        raise StartupError(
            f"{folder / 'config.json'} is refused: {reason}", fix="correct that file"
        ) from error
    except StartupError:
        raise
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError, ImportError) as error:
        if is_out_of_memory(error):
            raise
        raise StartupError(
            f"transformers cannot load {folder}: {first_line(error)}", fix=_CHECK_IT
        ) from error


def refuse_mismatched(folder: Path, mismatched: list[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Raise StartupError for weights of other shapes, each given by name, shape there, and shape here."""
    for name, stored, expected in sorted(mismatched):
        raise StartupError(
            f"{folder}: {name} is {list(stored)} in the files, and {list(expected)} by config.json"
            + (f" ({len(mismatched)} such tensors)" if len(mismatched) > 1 else ""),
            fix="take the config.json that belongs to these weights",
        )


def _refuse_missing(folder: Path, model: Any, missing: list[str], files: list[WeightFile]) -> None:
    """Raise StartupError for parameters that no file has, with what may be the cause."""
    if not missing:
        return
    output = model.get_output_embeddings()
    heads = [f"{name}.weight" for name, module in model.named_modules() if module is output]
    if missing == heads:
        raise StartupError(
            f"{folder} has no weights of the output layer ({heads[0]}), and config.json says by "
            "tie_word_embeddings that it has others than the embedding",
            fix="set tie_word_embeddings to true if they are the same, or take a checkpoint that has both",
        )
    unnamed = sorted({*folder.glob("*.safetensors")} - {file.path for file in files})
    raise StartupError(
        f"{folder} has no weights for {len(missing)} parameters, {missing[0]} first",
        fix=f"correct model.safetensors.index.json, which does not name {unnamed[0].name}"
        if unnamed
        else "download it again, or take the config.json that belongs to these weights",
    )


def compress(model: Any, modules: QuantizedModules | None) -> None:
    """Let layers keep latents where they can, and the keys of indexers. Raises FamilyRefused."""
    if modules is not None:
        # Codes are in groups along the inputs, and this product is multiplied by along its outputs too.
        for name, _ in list(find_expansions(model)):
            modules.expand(model, name)
    keep_latents(model)
    keep_index_keys(model)


def _refuse_layers(kind: ModelKind, model_config: Any) -> None:
    """Raise FamilyRefused for layers that are no attention, unless their functions are replaced."""
    if kind.is_paged and not (kind.task is Task.GENERATE and knows_recurrence(model_config)):
        refuse_layers(model_config.get_text_config(decoder=True))


def _class_of(kind: ModelKind, model_config: Any, state: dict[str, Tensor] | None) -> Any:
    if state is not None:  # which transformers takes by a class alone
        if kind.task is not Task.GENERATE:
            raise StartupError(
                f"GGUF files are not served for --task {kind.task.value}", fix="take the model's safetensors"
            )
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    match kind.task:
        case Task.GENERATE:
            return generating_class(model_config)
        case Task.EMBED:
            return AutoModel
        case Task.SCORE:
            return AutoModelForSequenceClassification


def _quieten() -> None:
    """Let transformers' lines go where ours go, in the same form."""
    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


def from_pretrained(model_class: Any, folder: Path | None, **options: Any) -> Any:
    """Build a model and read its weights: by torch's rules for shapes in C++, or by all where needed."""
    options |= {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    try:
        return model_class.from_pretrained(folder, **options)
    except NotImplementedError:
        if not load_shapes():
            raise
        return model_class.from_pretrained(folder, **options)
