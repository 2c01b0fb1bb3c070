"""Start of a draft model beside the model that it drafts for.

Owns: the check that both have one vocabulary, the load, and the trial over its part of each block.
Never: changes the start of the model itself, which only gets larger blocks.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers
import torch

from worker.attention.kv_cache import FLOAT8, LayerShape, cache_dtype, numbers_beside
from worker.attention.ref_attention import RefAttention
from worker.checkpoint.task import Task
from worker.devices.device import Device
from worker.memory_sizes import format_size
from worker.model.rope import longest_right_len
from worker.progress import LoadStage
from worker.sampling.row_sampler import RowSampler
from worker.speculation.unsupported import refuse_speculation
from worker.startup.kernel_choice import kernels_of
from worker.startup.loader import LoadedModel, ModelKind, find_kind, load_model
from worker.startup.ready_model import ReadyModel, probe_shapes, start_beside
from worker.startup.self_check import SelfCheck
from worker.steps.draft_model import DraftModel, DraftSizes
from worker.steps.model_runner import EagerSteps, ModelRunner
from worker.steps.row_table import RowTable
from worker.worker_config import AdapterLimits, DraftMethod, SpeculationConfig, WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError

log = logging.getLogger(__name__)

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A draft model in memory, before there is a cache."""

    config: WorkerConfig
    loaded: LoadedModel
    runner: ModelRunner
    shapes: dict[int, LayerShape]


@contextmanager
def naming_draft(config: WorkerConfig) -> Iterator[None]:
    """Say of an error that the draft model is meant. Raises StartupError."""
    try:
        yield
    except FamilyRefused as error:
        raise StartupError(
            f"draft model {config.speculation.model_path}: {error.what}; one must keep its state in blocks",
            fix="take one of another family (docs/models.md)",
        ) from error
    except StartupError as error:
        raise StartupError(
            f"draft model {config.speculation.model_path}: {error.what}", fix=error.fix
        ) from error


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


def verifies_drafts(config: WorkerConfig, device: Device) -> bool:
    """Tell whether steps verify drafts. Raises StartupError for speculation that there is none of."""
    if config.num_stages > 1:
        refuse_speculation(config, "stages verify no drafts yet")
        return False
    if config.speculation.method is DraftMethod.DRAFT_MODEL:
        reason = "a draft model is not divided over ranks yet" if config.num_ranks > 1 else None
        if (reason := reason or kernels_of(device).why_no_draft_model) is not None:
            refuse_speculation(config, f"{reason}; ngram and suffix are verified there")
    return True


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
    path = folder / _TOKENIZER
    if not path.is_file():
        raise StartupError(
            f"{folder} has no {_TOKENIZER}, by which vocabularies are compared",
            fix="take checkpoints that have one",
        )
    try:
        found: dict[str, int] = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises no other type
        raise StartupError(f"{path} cannot be read: {error}", fix="download it again") from error
    return found


def load_draft(
    config: WorkerConfig, kind: ModelKind, loaded: LoadedModel, device: Device
) -> LoadedDraft | None:
    """Load the draft model, if there is one. Raises StartupError."""
    if config.speculation.method is not DraftMethod.DRAFT_MODEL:
        return None
    refuse_scales_with_draft(config)
    own = draft_config(config, str(loaded.dtype).removeprefix("torch."))
    with naming_draft(config):
        draft_kind = find_kind(own)
        check_vocabulary(kind, draft_kind)
        stage = LoadStage()  # the bar is the model's
        # Before memory is measured for the cache of both.
        draft = load_model(own, draft_kind, device, stage)
        draft.weights.settle(stage)
        runner = ModelRunner(draft.model, draft.vocab_size)
        return LoadedDraft(
            config=own, loaded=draft, runner=runner, shapes=probe_shapes(device, draft, runner)
        )


def _tokens_of_pass(config: WorkerConfig, saturating_tokens: int) -> int:
    """Find the most tokens of a pass: no more of a prompt than a step would compute beside decodes."""
    most = config.max_num_batched_tokens
    return min(most, max(saturating_tokens, config.max_num_seqs)) if saturating_tokens else most


def open_draft(
    draft: LoadedDraft, ready: ReadyModel[ModelRunner], device: Device, rows: RowTable, sampler: RowSampler
) -> DraftModel:
    """Try the draft model over its part of the cache, for these rows. Raises StartupError."""
    facts, loaded = ready.facts, draft.loaded
    layers_of_both = sorted(ready.cache.layout.layers)
    layers = layers_of_both[: -len(draft.shapes)]
    view = ready.cache.view_of(numbers_beside(layers, draft.shapes))
    max_len = min(longest_right_len(loaded.text_config, loaded.checkpoint_len, None), facts.max_model_len)
    check = SelfCheck(
        loaded=loaded,
        runner=draft.runner,
        backend=RefAttention(view, device),
        cache=view,
        device=device,
        max_model_len=max_len,
    )
    backend = start_beside(draft.config, ready.toolkit, check)
    log.info(
        "draft model %s: weights %s, context %s tokens",
        *(loaded.model_type, format_size(loaded.weight_bytes), max_len),
    )
    sizes = DraftSizes(
        vocab_size=loaded.vocab_size,
        sampled_vocab_size=facts.vocab_size,
        max_len=max_len,
        max_tokens=_tokens_of_pass(draft.config, kernels_of(device).saturating_tokens),
        num_blocks=facts.num_blocks,
        num_host_blocks=facts.num_host_blocks,
    )
    return DraftModel(EagerSteps(draft.runner, backend, device), rows, sampler, sizes)
