"""A checkpoint folder -> a transformers model whose attention calls reach us.

Owns: which class (from config.model_type in transformers' own causal-LM mapping), which checkpoints
are refused unread and why, and what generation_config.json says.
Never: code from the checkpoint (auto_map is not followed), pickled weights, the network.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.utils import logging as transformers_logging

from worker.attention.interface import ATTENTION_NAME, attention_forward
from worker.checkpoint import find_checkpoint, find_weights, read_json, warm_page_cache
from worker.config import WorkerConfig
from worker.device import Device
from worker.errors import FamilyRefused, StartupError
from worker.progress import LoadStage

_CHECK_IT = "check the checkpoint with AutoModelForCausalLM.from_pretrained"
NO_PAGED_ATTENTION = "has attention of its own that a paged KV cache cannot be put under"
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_DEFAULT_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
# Where families keep the length of their context window, besides max_position_embeddings.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

AttentionInterface.register(ATTENTION_NAME, attention_forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    model: nn.Module
    dtype: torch.dtype
    model_type: str
    text_config: Any
    """The part of the configuration that describes the language model."""
    num_parameters: int
    weight_bytes: int
    vocab_size: int
    checkpoint_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]


def load_model(config: WorkerConfig, device: Device, stage: LoadStage) -> LoadedModel:
    """Load the weights onto the device. Raises StartupError for everything that cannot be served."""
    if config.dtype not in _DTYPES:
        raise StartupError(f"unknown dtype {config.dtype!r}", fix=f"ask for one of {', '.join(_DTYPES)}")
    folder = find_checkpoint(config.model_path)
    checkpoint_config = read_json(folder / "config.json")
    _refuse_unread(checkpoint_config)
    files = find_weights(folder)
    stage.name, stage.total_bytes = "reading weights", sum(file.num_bytes for file in files)

    def count(num_bytes: int) -> None:
        stage.done_bytes += num_bytes

    warm_page_cache(files, count)
    stage.name = "building the model"
    model = _build(folder, config.dtype).to(device.torch_device).eval()
    text_config = model.config.get_text_config(decoder=True)
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    parameters = list(model.parameters())
    return LoadedModel(
        model=model,
        dtype=model.dtype,
        model_type=model.config.model_type,
        text_config=text_config,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        vocab_size=_vocab_size(model),
        checkpoint_len=_checkpoint_len(text_config),
        eos_token_ids=_eos_token_ids(generation_config, text_config, model.config),
        default_sampling=_default_sampling(generation_config),
    )


def refuse_layers(text_config: Any) -> None:
    """Raise StartupError for layers that attend in a way the attention call does not tell."""
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    unknown = sorted(layer_types - _SUPPORTED_LAYERS)
    if unknown:
        raise FamilyRefused(
            f"{text_config.model_type} has layers of type {', '.join(unknown)}, which this worker cannot "
            "compute: it keeps keys and values of full and sliding attention only"
        )


def _refuse_unread(checkpoint_config: dict[str, Any]) -> None:
    """Refuse, before any weights are read, what the configuration alone rules out."""
    model_type = checkpoint_config.get("model_type")
    if not isinstance(model_type, str):
        raise StartupError("config.json names no model_type", fix="give a checkpoint in Hugging Face format")
    if model_type not in CONFIG_MAPPING:
        raise StartupError(
            f"model_type {model_type!r} is unknown to the installed transformers, and code that comes with "
            "a checkpoint is never run",
            fix="upgrade transformers, or serve a model of another family",
        )
    if CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise FamilyRefused(f"{model_type} models do not generate text token by token")
    if checkpoint_config.get("is_encoder_decoder"):
        raise FamilyRefused(f"{model_type} is an encoder-decoder, not a decoder alone")
    quantization = checkpoint_config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise StartupError(
            f"the checkpoint is quantized ({method}), which is not supported yet",
            fix="take the same model in bfloat16 or float16",
        )


def _build(folder: Path, dtype: str) -> Any:
    transformers_logging.disable_progress_bar()
    try:
        model_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        refuse_layers(model_config.get_text_config(decoder=True))
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except KeyError as error:
        if ATTENTION_NAME in error.args:  # the class looks attention up in a table of its own
            raise FamilyRefused(f"{model_config.model_type} {NO_PAGED_ATTENTION}") from error
        raise StartupError(f"transformers cannot load {folder}: {error}", fix=_CHECK_IT) from error
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError, ImportError) as error:
        raise StartupError(
            f"transformers cannot load {folder}: {_first_line(error)}", fix=_CHECK_IT
        ) from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise StartupError(
            f"{folder} has no weights for {len(missing)} parameters, {missing[0]} first",
            fix="download it again",
        )
    return model


def _vocab_size(model: Any) -> int:
    """Count the tokens that can be both read and drawn: some families read more than they draw."""
    num_read = int(model.get_input_embeddings().weight.shape[0])
    output = model.get_output_embeddings()
    return num_read if output is None else min(num_read, int(output.weight.shape[0]))


def _checkpoint_len(text_config: Any) -> int:
    lengths = [getattr(text_config, key, None) for key in _LENGTH_KEYS]
    length = next((int(length) for length in lengths if isinstance(length, int) and length > 0), None)
    if length is None:
        raise FamilyRefused(f"the configuration of {text_config.model_type} gives no context window")
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):
        # Yarn is often added to a configuration whose max_position_embeddings still tells the length before.
        length = max(length, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return length


def _eos_token_ids(generation_config: dict[str, Any], *configs: Any) -> tuple[int, ...]:
    """Merge what all places say: either may know an end-of-turn token that the other lacks."""
    found: list[int] = []
    for value in (
        generation_config.get("eos_token_id"),
        *(getattr(each, "eos_token_id", None) for each in configs),
    ):
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))


def _default_sampling(generation_config: dict[str, Any]) -> dict[str, float]:
    """Take what the file really sets; temperature and truncation only where it says that they apply."""
    keys = ["repetition_penalty"]
    if generation_config.get("do_sample") is True:
        keys += _DEFAULT_SAMPLING
    return {key: generation_config[key] for key in keys if generation_config.get(key) is not None}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
