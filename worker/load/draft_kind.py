"""The draft model that a model may have: its configuration, and the refusal of one that does not fit."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from worker.attention.kv_cache import FLOAT8, KeptShapes, cache_dtype
from worker.checkpoint.checkpoint_files import find_checkpoint, read_json
from worker.checkpoint.task import Task
from worker.checkpoint.tokenizer_files import TOKENIZER, find_vocabulary, read_tokenizer
from worker.load.model_kind import ModelKind
from worker.model.layer_parts import Unrecognised
from worker.model.layer_shards import refuse_division, shard_shape, shard_state
from worker.worker_config import AdapterLimits, DraftMethod, SpeculationConfig, WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError, one_line

log = logging.getLogger(__name__)

WITHOUT_HEAD = 'leave it out by --speculative-config \'{"method": "off"}\'; what is generated is the same'

_EAGLES = frozenset(
    ("eagle3", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
)

_ERRORS_OF_A_HEAD = (
    *(MemoryError, RuntimeError, AttributeError, LookupError, TypeError, ValueError),
    *(OSError, SafetensorError, ArithmeticError, StrictDataclassError),
)
"""Errors of transformers, torch and files for a layer that is not as it was taken to be, or has no room."""


def refuse_speculation(config: WorkerConfig, reason: str) -> None:
    """Raise StartupError if --speculative-config was given; `reason` says what drafts are in the way of."""
    if config.speculation.method not in (DraftMethod.AUTO, DraftMethod.PREDICTION):
        raise StartupError(
            f"--speculative-config: {reason}",
            fix="leave it out; what is generated is the same without it",
        )


@contextmanager
def naming_draft(config: WorkerConfig) -> Iterator[None]:
    """Say of an error that the draft model, or the head, is meant. Raises StartupError.

    An error of a head that was not asked for is logged, and passes.
    """
    if config.speculation.method is not DraftMethod.DRAFT_MODEL:
        with _naming_head(config):
            yield
        return
    name = f"draft model {config.speculation.model_path}"
    try:
        yield
    except FamilyRefused as error:
        fix = "take one of another family (docs/models.md)"
        raise StartupError(f"{name}: {error.what}; one must keep its state in blocks", fix=fix) from error
    except StartupError as error:
        raise StartupError(f"{name}: {error.what}", fix=error.fix) from error
    except _ERRORS_OF_A_HEAD as error:
        fix = "download it again, or take another one"
        raise StartupError(f"{name}: {type(error).__name__}: {error}", fix=fix) from error


@contextmanager
def _naming_head(config: WorkerConfig) -> Iterator[None]:
    try:
        yield
    except StartupError as error:  # of a family too: without its head the model can be served
        if config.speculation.method is not DraftMethod.AUTO:
            raise StartupError(f"draft head: {error.what}", fix=WITHOUT_HEAD) from error
        note_left_out(error.what)
    except _ERRORS_OF_A_HEAD as error:
        if config.speculation.method is not DraftMethod.AUTO:
            raise StartupError(f"draft head: {type(error).__name__}: {error}", fix=WITHOUT_HEAD) from error
        note_left_out(f"{type(error).__name__}: {error}")


def note_left_out(reason: str) -> None:
    """Log why a head that was not asked for is left out."""
    log.info("draft head: %s: the model is served without it", one_line(reason))


def refuse_with_head(config: WorkerConfig) -> None:
    """Raise StartupError for what a head does not go with. Ranks and GPUs are asked before."""
    refuse_scales_with_draft(config)
    if config.adapter_limits.max_in_step:
        raise StartupError("adapters are not part of what a draft head has learned", fix=WITHOUT_HEAD)


def refuse_index_keys(model_type: str, kept: KeptShapes) -> None:
    """Raise StartupError for a head whose layer chooses its keys."""
    if kept.has_index_keys:
        raise StartupError(f"{model_type} has layers that choose their keys", fix=WITHOUT_HEAD)


def refuse_uneven(kept: KeptShapes, num_ranks: int) -> None:
    """Raise StartupError for a draft model, or a head, whose KV heads or states ranks cannot divide."""
    try:
        for shape in kept.layers.values():
            shard_shape(shape, num_ranks)
        for state in kept.states.values():
            shard_state(state, num_ranks)
    except Unrecognised as uneven:
        raise refuse_division(f"--tensor-parallel-size {num_ranks}", str(uneven)) from uneven


def draft_config(config: WorkerConfig, dtype: str) -> WorkerConfig:
    """Make the configuration of the draft model: the numbers and the kernels are those of the model."""
    return replace(
        config,
        model_path=config.speculation.model_path,
        task=Task.GENERATE.value,
        dtype=dtype,
        checksums_file=None,
        chat_template_file=None,
        sampling_overrides={},
        config_overrides={},
        max_model_len=None,
        speculation=SpeculationConfig(),
        adapters=(),
        adapter_limits=AdapterLimits(),
    )


def find_eagle(speculation: SpeculationConfig) -> dict[str, Any] | None:
    """Read the configuration of a head of EAGLE-3 in a folder of its own; None of another draft model.

    Raises StartupError for a head of another kind, and where one of EAGLE-3 was asked for and it is none.
    """
    content = read_json(find_checkpoint(speculation.model_path) / "config.json")
    names = [content.get("speculators_model_type"), *(content.get("architectures") or ())]
    if not _EAGLES.isdisjoint(map(str, names)):
        return content
    for name in map(str, names):
        if name.lower().startswith(("eagle", "medusa", "mlp_speculator", "dflash")) or "Eagle" in name:
            raise StartupError(
                f"it is a head of a kind that is not read ({name})",
                fix="take a head of EAGLE-3, a smaller model with the same tokenizer, or a model with a head",
            )
    if speculation.is_eagle:
        raise StartupError("it is no head of EAGLE-3", fix="use the method draft_model for a smaller model")
    return None


def refuse_scales_with_draft(config: WorkerConfig) -> None:
    """Raise StartupError for a KV cache with scales, which are measured for the model's layers alone."""
    # Any dtype of the model: it does not change the answer.
    if cache_dtype(config.kv_cache_dtype, torch.float32) is FLOAT8:
        raise StartupError(
            f"--kv-cache-dtype {config.kv_cache_dtype} does not go with a draft model, which has no scales",
            fix="leave one of them out",
        )


def check_vocabulary(kind: ModelKind, draft_kind: ModelKind) -> None:
    """Raise StartupError unless a token is the same text for both models."""
    words, draft_words = _vocabulary(kind.folder), _vocabulary(draft_kind.folder)
    if words == draft_words:
        return
    ids = set(words.values()) ^ set(draft_words.values())
    differing = [word for word, token_id in words.items() if draft_words.get(word) != token_id]
    example = repr(differing[0]) if differing else f"token {min(ids)}"
    raise StartupError(
        f"it has another vocabulary than the model ({len(draft_words)} and {len(words)} tokens, "
        f"{max(len(differing), len(ids))} of them not the same, {example} first)",
        fix="take a smaller model of the same family, which has the same tokenizer.json",
    )


def _vocabulary(folder: Path) -> dict[str, int]:
    path = find_vocabulary(folder)
    if path is None:
        raise StartupError(
            f"{folder} has no {TOKENIZER}, by which vocabularies are compared",
            fix="take checkpoints that have one",
        )
    try:
        backend = tokenizers.Tokenizer.from_buffer(read_tokenizer(folder).text)
        found: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises no other type
        raise StartupError(f"{path} cannot be read: {error}", fix="download it again") from error
    return found
