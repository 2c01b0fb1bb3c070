"""Start of a draft model, or of the head of a checkpoint, next to the model that it drafts for."""

import logging

from worker.devices.device import Device
from worker.load.draft_kind import (
    WITHOUT_HEAD,
    check_vocabulary,
    draft_config,
    find_eagle,
    naming_draft,
    refuse_scales_with_draft,
    refuse_uneven,
)
from worker.load.loader import LoadedModel, load_model
from worker.load.model_kind import ModelKind, find_kind
from worker.progress import LoadStage
from worker.startup.kernel_choice import kernels_of
from worker.startup.probing import Start, probe_shapes
from worker.startup.proving import prove_draft
from worker.startup.ready_model import ReadyModel
from worker.startup.start_head import LoadedDraft, load_eagle, load_head
from worker.steps.draft_model import DraftSizes
from worker.steps.head_steps import DeviceStates, HeadSteps, HostStates, KeptStates
from worker.steps.model_runner import EagerSteps, ModelRunner, StepRunner
from worker.steps.row_table import RowTable
from worker.worker_config import DraftMethod, WorkerConfig

log = logging.getLogger(__name__)


def load_draft(
    config: WorkerConfig, kind: ModelKind, loaded: LoadedModel, device: Device
) -> LoadedDraft | None:
    """Load the draft model, if there is one. Raises StartupError."""
    method = config.speculation.method
    if method in (DraftMethod.AUTO, DraftMethod.MTP):
        with naming_draft(config):
            return load_head(config, kind, loaded, device)
    if method is not DraftMethod.DRAFT_MODEL:
        return None
    own = draft_config(config, str(loaded.dtype).removeprefix("torch."))
    with naming_draft(config):
        if (content := find_eagle(config.speculation)) is not None:
            return load_eagle(config, content, loaded, device)
        refuse_scales_with_draft(config)
        draft_kind = find_kind(own)
        check_vocabulary(kind, draft_kind)
        stage = LoadStage()  # the bar is the model's
        # Before memory is measured for the cache of both.
        draft = load_model(own, draft_kind, device, stage, loaded.ranks)
        draft.weights.settle(stage)
        runner = ModelRunner(draft.model, draft.vocab_size)
        start = Start(config=own, device=device, stage=stage, loaded=draft, runner=runner)
        kept = probe_shapes(device, draft, runner)
        refuse_uneven(kept, loaded.ranks.size)
        return LoadedDraft(start, runner, kept)


def open_draft(
    config: WorkerConfig, draft: LoadedDraft, ready: ReadyModel[ModelRunner], rows: RowTable
) -> tuple[StepRunner, DraftSizes, KeptStates | None] | None:
    """Try the draft model over its part of the cache. Raises StartupError.

    None for a head that was not asked for and cannot be taken.
    """
    with naming_draft(config):
        return _open_draft(draft, ready, rows)
    log.info("the KV cache keeps its place for that head all the same; %s", WITHOUT_HEAD)
    return None


def _open_draft(
    draft: LoadedDraft, ready: ReadyModel[ModelRunner], rows: RowTable
) -> tuple[StepRunner, DraftSizes, KeptStates | None]:
    facts, start, cache, head = ready.facts, draft.start, ready.pools.cache, draft.head
    toolkit = ready.measured.toolkit
    layers = cache.view_beside(draft.kept).layers
    loaded, device = start.loaded, start.device
    kept: KeptStates | None = None
    if head is not None and kernels_of(device).is_on_host:
        kept = HostStates(layers[max(layers)], head, loaded.ranks)
    elif head is not None:
        kept = DeviceStates(layers[max(layers)], head, loaded.ranks, device)
    # Kernels may have packed one that is tied, and the plain one is to go.
    if head is not None and not head.has_embedding:
        head.body.embed_tokens = ready.runner.model.get_input_embeddings()
    whole_layout = ready.measured.whole_layout
    backend, max_len = prove_draft(start, draft.kept, whole_layout, toolkit, cache, facts.max_model_len)
    if head is not None and toolkit is not None:
        toolkit.replace_linears(head, head.linears)
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
    ready.runner.keep_hidden(head.tapped)
    steps = HeadSteps(head, ready.runner, backend, kept, rows, device)
    if toolkit is None or not toolkit.runs_ahead:
        return steps, sizes, kept
    assert isinstance(kept, DeviceStates)
    ready.runner.hidden_listener = kept.keep_in_step
    return steps, sizes, None


def _tokens_of_pass(config: WorkerConfig, saturating_tokens: int) -> int:
    """Find the most tokens of a pass: no more of a prompt than a step computes next to decodes."""
    most = config.max_num_batched_tokens
    return min(most, max(saturating_tokens, config.max_num_seqs)) if saturating_tokens else most
