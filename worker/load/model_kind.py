"""Kind of a checkpoint: the task, the format and the options by which its model is built and divided."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING_NAMES
from transformers.utils.import_utils import is_timm_available, is_vision_available

from worker.attention.indexers import INDEXED_LAYERS
from worker.attention.interface import CHUNKED_LAYER, FULL_LAYER, SLIDING_LAYER
from worker.checkpoint.checkpoint_files import WeightFile, find_checkpoint, read_json
from worker.checkpoint.checksums import Checksums
from worker.checkpoint.overrides import in_known_words, merged
from worker.checkpoint.task import Task
from worker.checkpoint.task_choice import OF_TWO_CLASSES, choose_task, reads_both_ways
from worker.model.corrections import rope_types
from worker.quantized.formats import find_rules
from worker.quantized.scheme import Rules
from worker.worker_config import WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError, refused_as

NO_PAGED_ATTENTION = "has attention of its own that a paged KV cache cannot be put under"
_NEEDS_TIMM = "TimmWrapperModel"
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_SUPPORTED_LAYERS = frozenset({FULL_LAYER, SLIDING_LAYER, CHUNKED_LAYER, *INDEXED_LAYERS})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """Properties of a checkpoint that decide how it is built and run."""

    folder: Path
    checkpoint_config: dict[str, Any]
    """config.json with the operator's changes, in transformers' words."""
    task: Task
    quantization: Rules | None
    """Rules of a checkpoint whose weights were rounded before; None: they are plain."""
    is_encoder: bool
    """Tokens see later ones: there is no KV cache, and attention stays the model's own."""
    keeps_own_cache: bool = False
    """Attention, or its replacement in the family, stays the model's own: no paged KV cache fits under it."""
    is_text_alone: bool = False
    """Ranks or stages have parts of it: nothing reads pictures of a family of two classes."""

    @property
    def is_paged(self) -> bool:
        """Whether attention calls go to a paged KV cache."""
        return not (self.is_encoder or self.keeps_own_cache)


def find_kind(config: WorkerConfig) -> ModelKind:
    """Read config.json, and compare all texts with their checksums. Raises StartupError to refuse them."""
    folder = find_checkpoint(config.model_path)
    if config.checksums_file is not None:
        Checksums.read(Path(config.checksums_file)).check_texts(folder)
    content = read_json(folder / "config.json")
    with refused_as(partial(StartupError, fix="correct that file"), folder / "config.json"):
        checkpoint_config = in_known_words(merged(content, config.config_overrides))
    if checkpoint_config.get("transformers_weights") not in (None, "model.safetensors"):
        raise StartupError(
            f"{folder / 'config.json'} names weights of its own, by transformers_weights",
            fix="name them model.safetensors, and remove that key",
        )
    task = choose_task(config.task, folder, checkpoint_config)
    return ModelKind(
        folder=folder,
        checkpoint_config=checkpoint_config,
        task=task,
        quantization=find_rules(folder, checkpoint_config),
        is_encoder=reads_both_ways(checkpoint_config),
        is_text_alone=config.num_ranks * config.num_stages > 1,
    )


def model_config_of(kind: ModelKind, files: list[WeightFile]) -> Any:
    """Make transformers' configuration of a checkpoint, with the operator's values in it.

    A family whose other parts need libraries that are not installed is its text part alone, and so is one of
    two classes without a tower in the files, or whose pictures nothing reads. An output layer that is in no
    file is the embedding, if either the whole or its text part says so.
    """
    content = deepcopy(kind.checkpoint_config)  # objects in it are changed there
    whole = CONFIG_MAPPING[content["model_type"]].from_dict(content)
    config = _served_part(whole, kind, files)
    _refuse_angles(config.get_text_config(decoder=True))
    has_head = any("lm_head." in name for file in files for name in file.tensors)
    parts = (whole, whole.get_text_config(decoder=True))
    if not has_head and any(getattr(each, "tie_word_embeddings", False) for each in parts):
        config.tie_word_embeddings = True
    return config


def _refuse_angles(text_config: Any) -> None:
    """Raise StartupError for rotary embeddings that transformers has no formula for, such as `ntk`."""
    known = ("default", "axial", *ROPE_INIT_FUNCTIONS)
    for kind in sorted(rope_types(text_config).difference(known)):
        raise StartupError(
            f"config.json has rotary embeddings of type {kind:.40}",
            fix=f"take a checkpoint with {', '.join(known)}",
        )


def _served_part(config: Any, kind: ModelKind, files: list[WeightFile]) -> Any:
    if config.model_type in OF_TWO_CLASSES and kind.task is Task.GENERATE:
        has_tower = any("visual." in name for file in files for name in file.tensors)
        return config if has_tower and not kind.is_text_alone else config.get_text_config(decoder=True)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not (is_timm_available() and is_vision_available()):
        others = [getattr(config, name, None) for name in config.sub_configs]
        classes = {MODEL_MAPPING_NAMES.get(getattr(each, "model_type", "")) for each in others}
        return config.get_text_config(decoder=True) if _NEEDS_TIMM in classes else config
    return config


def dtype_name(dtype: str, checkpoint_config: dict[str, Any]) -> str | None:
    """Name the dtype that the weights will have; None for that of the files.

    The part for text may name it alone. Raises StartupError for a name that is none of a dtype.
    """
    if dtype != "auto":
        return dtype
    parts = (checkpoint_config, checkpoint_config.get("text_config") or {})
    said = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    named = next((each for each in said if isinstance(each, str)), None)
    if named not in (None, *_FLOATS):
        raise StartupError(
            f"config.json has dtype {named:.40}",
            fix="""set another, such as --hf-overrides '{"dtype": "bfloat16"}'""",
        )
    return named


def torch_dtype(dtype: str, kind: ModelKind) -> torch.dtype:
    """Find the dtype that the weights will have; float32 where neither option nor files name one."""
    named: torch.dtype = getattr(torch, dtype_name(dtype, kind.checkpoint_config) or "float32")
    return named


def refuse_layers(text_config: Any) -> None:
    """Raise StartupError for layers whose kind of attention the attention call does not show.

    Of families whose recurrent layers are replaced, nothing is asked: they are tried.
    """
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    unknown = sorted(layer_types - _SUPPORTED_LAYERS)
    if unknown:
        raise FamilyRefused(
            f"{text_config.model_type} has layers of type {', '.join(unknown)}, which this worker cannot "
            "compute: it keeps keys and values of full, sliding and chunked attention only"
        )


def describe_division(config: WorkerConfig) -> str:
    """Name the options that divide the model."""
    options = {"--tensor-parallel-size": config.num_ranks, "--pipeline-parallel-size": config.num_stages}
    return " ".join(f"{option} {number}" for option, number in options.items() if number > 1)


def refuse_ranks(config: WorkerConfig, kind: ModelKind) -> None:
    """Raise StartupError for ranks of a kind of model that is not divided among them."""
    if config.num_ranks == config.num_stages == 1:
        return
    asked = describe_division(config)
    if kind.task is not Task.GENERATE or kind.is_encoder:
        raise StartupError(
            f"{asked} divides models that generate, and this one is made to {kind.task.value}",
            fix="leave it out",
        )
