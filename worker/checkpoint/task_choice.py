"""Choice of the task that a checkpoint is served for.

Owns: the choice of a task if the operator names none, the class that generates, and whether the model reads a
prompt in both directions.
"""

from pathlib import Path
from typing import Any

from transformers.generation.utils import GenerationMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from worker.checkpoint.pooling_files import MODULES_FILE
from worker.checkpoint.task import Task
from worker.worker_errors import FamilyRefused, StartupError

_AUTO = "auto"
OF_TWO_CLASSES = frozenset({"qwen3_5", "qwen3_5_moe"})
"""Families of which transformers takes the text alone, unless it is asked for the class of the whole."""
_CLASSIFIER = "ForSequenceClassification"


# Tables in which transformers must list the family, and the reason to refuse one that it does not.
_MAPPINGS = {
    Task.GENERATE: (
        (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        "do not generate text token by token",
    ),
    Task.EMBED: ((MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING), "do not read text"),
    Task.SCORE: ((MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,), "have no classification head"),
}


def choose_task(asked: str, folder: Path, checkpoint_config: dict[str, Any]) -> Task:
    """Take the task asked for, or the one the checkpoint is made for. Raises StartupError if it cannot be."""
    model_type = checkpoint_config.get("model_type")
    if not isinstance(model_type, str):
        raise StartupError("config.json names no model_type", fix="give a checkpoint in Hugging Face format")
    if model_type not in CONFIG_MAPPING:
        raise StartupError(
            f"model_type {model_type!r} is unknown to the installed transformers, and code that comes with "
            "a checkpoint is never run",
            fix="upgrade transformers, or serve a model of another family",
        )
    task = _made_for(folder, checkpoint_config) if asked == _AUTO else Task(asked)
    mappings, lack = _MAPPINGS[task]
    if not any(CONFIG_MAPPING[model_type] in mapping for mapping in mappings):
        raise FamilyRefused(f"{model_type} models {lack}")
    if checkpoint_config.get("is_encoder_decoder"):
        raise FamilyRefused(f"{model_type} is an encoder-decoder, not a decoder or an encoder alone")
    if task is Task.GENERATE and reads_both_ways(checkpoint_config):
        raise StartupError(
            f"this {model_type} checkpoint is an encoder: it does not generate text token by token",
            fix="leave out --task, or serve a model of another family",
        )
    if task is Task.SCORE and not _has_classifier(checkpoint_config):
        raise StartupError(
            "the checkpoint has no classification head", fix="ask for --task embed, or leave it out"
        )
    return task


def generating_class(model_config: Any) -> Any:
    """Choose transformers' class of a model that generates: for text alone, or for pictures and text.

    Raises FamilyRefused for one that generates in a way of its own.
    """
    if type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING and model_config.model_type not in OF_TWO_CLASSES:
        return AutoModelForCausalLM
    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(model_config)]
    if getattr(found, "generate", None) is not GenerationMixin.generate:
        raise FamilyRefused(f"{model_config.model_type} models do not generate text token by token")
    return AutoModelForImageTextToText


def reads_both_ways(checkpoint_config: dict[str, Any]) -> bool:
    """Whether a token sees later ones: an encoder, or a decoder that was trained on as one."""
    if checkpoint_config.get("use_bidirectional_attention") in (True, "all"):
        return True
    if checkpoint_config.get("is_causal") is False:
        return True
    is_encoder = CONFIG_MAPPING[checkpoint_config["model_type"]] in MODEL_FOR_MASKED_LM_MAPPING
    return is_encoder and not checkpoint_config.get("is_decoder")


def _made_for(folder: Path, checkpoint_config: dict[str, Any]) -> Task:
    if _has_classifier(checkpoint_config):
        return Task.SCORE
    if (folder / MODULES_FILE).is_file() or reads_both_ways(checkpoint_config):
        return Task.EMBED
    return Task.GENERATE


def _has_classifier(checkpoint_config: dict[str, Any]) -> bool:
    return any(str(name).endswith(_CLASSIFIER) for name in checkpoint_config.get("architectures") or ())
