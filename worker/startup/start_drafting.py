"""Start of a draft model, or of the head of a checkpoint, next to the model that it drafts for.

Owns: its load, and the sizes by which it steps.
Never: changes the start of the model itself, which only gets larger blocks.
"""

import logging
from dataclasses import replace
from typing import NamedTuple

from worker.attention.kv_cache import KeptShapes, with_hidden_states
from worker.checkpoint.checkpoint_files import find_weights
from worker.devices.device import Device
from worker.devices.weight_life import WeightLife
from worker.load.draft_head import DraftHead, build_head
from worker.load.draft_kind import (
    check_vocabulary,
    draft_config,
    naming_draft,
    refuse_index_keys,
    refuse_scales_with_draft,
)
from worker.load.loader import LoadedModel, load_model
from worker.load.model_kind import ModelKind, find_kind
from worker.memory_sizes import format_size
from worker.model.corrections import longest_right_len
from worker.model.mixture import find_experts
from worker.progress import LoadStage
from worker.startup.kernel_choice import find_own_head, kernels_of
from worker.startup.probing import Start, probe_shapes
from worker.startup.proving import prove_draft
from worker.startup.ready_model import ReadyModel
from worker.steps.draft_model import DraftSizes
from worker.steps.head_steps import HeadSteps, KeptStates
from worker.steps.model_runner import BodyRunner, EagerSteps, ModelRunner, StepRunner
from worker.steps.row_table import RowTable
from worker.worker_config import DraftMethod, WorkerConfig
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)


class LoadedDraft(NamedTuple):
    """A draft model in memory, before there is a cache."""

    start: Start
    runner: ModelRunner | BodyRunner
    kept: KeptShapes
    """What it keeps; the last layer of a head's is of the model's hidden states."""
    head: DraftHead | None = None
    """The head, if it is one; `start` and `runner` are then those of its layer."""


def load_draft(
    config: WorkerConfig, kind: ModelKind, loaded: LoadedModel, device: Device
) -> LoadedDraft | None:
    """Load the draft model, if there is one. Raises StartupError."""
    method = config.speculation.method
    if method in (DraftMethod.AUTO, DraftMethod.MTP):
        try:
            with naming_draft(config):
                return _load_head(config, kind, loaded, device)
        except StartupError as error:
            if method is DraftMethod.MTP:
                raise
            log.info("%s: the model is served without it", error.what)
    if method is not DraftMethod.DRAFT_MODEL:
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
        start = Start(config=own, device=device, stage=stage, loaded=draft, runner=runner)
        return LoadedDraft(start, runner, probe_shapes(device, draft, runner))


def _load_head(
    config: WorkerConfig, kind: ModelKind, loaded: LoadedModel, device: Device
) -> LoadedDraft | None:
    """Load the head of the checkpoint as one layer of the model's family. Raises StartupError."""
    files = find_weights(kind.folder)
    stored = find_own_head(config, kind, files, device)
    if stored is None:
        return None
    head = build_head(kind, stored, loaded.model)
    runner = BodyRunner(head.find_body)
    parameters = [each for name, each in head.named_parameters() if "embed_tokens" not in name]
    layer = replace(
        loaded,
        model=head.body,
        text_config=head.body.config,
        num_parameters=sum(each.numel() for each in parameters),
        weight_bytes=sum(each.nbytes for each in parameters),
        weights=WeightLife(head, device, [file.path for file in files]),
        has_experts=any(find_experts(head.body)),
    )
    stage = LoadStage()  # the bar is the model's
    start = Start(config=config, device=device, stage=stage, loaded=layer, runner=runner)
    kept = probe_shapes(device, layer, runner)
    refuse_index_keys(loaded.model_type, kept)
    layer.weights.settle(stage)
    return LoadedDraft(start, runner, with_hidden_states(kept.layers, head.body.config.hidden_size), head)


def open_draft(
    config: WorkerConfig, draft: LoadedDraft, ready: ReadyModel[ModelRunner], rows: RowTable
) -> tuple[StepRunner, DraftSizes, KeptStates | None] | None:
    """Try the draft model over its part of the cache. Raises StartupError.

    None for a head that was not asked for and cannot be taken.
    """
    try:
        with naming_draft(config):
            return _open_draft(draft, ready, rows)
    except StartupError as error:
        if config.speculation.method is not DraftMethod.AUTO:
            raise
        log.warning("%s: the model is served without it", error.what)
        return None


def _open_draft(
    draft: LoadedDraft, ready: ReadyModel[ModelRunner], rows: RowTable
) -> tuple[StepRunner, DraftSizes, KeptStates | None]:
    facts, start, cache, head = ready.facts, draft.start, ready.pools.cache, draft.head
    toolkit = ready.measured.toolkit
    layers = cache.view_beside(draft.kept).layers
    kept = None if head is None else KeptStates(layers[max(layers)])
    loaded, device = start.loaded, start.device
    max_len = min(longest_right_len(loaded.text_config, loaded.checkpoint_len, None), facts.max_model_len)
    backend = prove_draft(start, draft.kept, toolkit, cache, max_len)
    if head is not None and toolkit is not None:
        toolkit.replace_linears(head, ["joint"])
    log.info(
        "draft %s %s: weights %s, context %s tokens",
        *("model" if head is None else "head of", loaded.model_type),
        *(format_size(loaded.weight_bytes), max_len),
    )
    sizes = DraftSizes(
        vocab_size=loaded.vocab_size,
        sampled_vocab_size=facts.vocab_size,
        max_len=max_len,
        max_tokens=_tokens_of_pass(start.config, kernels_of(device).saturating_tokens),
        num_blocks=facts.num_blocks,
        num_host_blocks=facts.num_host_blocks,
        has_state=bool(draft.kept.states),
        num_ahead=0 if head is None else 1,
    )
    if head is None or kept is None:
        assert isinstance(draft.runner, ModelRunner)
        return EagerSteps(draft.runner, backend, device), sizes, None
    return HeadSteps(head, ready.runner, backend, kept, rows, device), sizes, kept


def _tokens_of_pass(config: WorkerConfig, saturating_tokens: int) -> int:
    """Find the most tokens of a pass: no more of a prompt than a step computes next to decodes."""
    most = config.max_num_batched_tokens
    return min(most, max(saturating_tokens, config.max_num_seqs)) if saturating_tokens else most
