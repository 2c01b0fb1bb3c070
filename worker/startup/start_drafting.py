"""Start of a draft model next to the model that it drafts for.

Owns: its load, and the sizes by which it steps.
Never: changes the start of the model itself, which only gets larger blocks.
"""

import logging
from typing import NamedTuple

from worker.attention.kv_cache import KeptShapes
from worker.devices.device import Device
from worker.load.draft_kind import (
    check_vocabulary,
    draft_config,
    naming_draft,
    refuse_scales_with_draft,
)
from worker.load.loader import LoadedModel, load_model
from worker.load.model_kind import ModelKind, find_kind
from worker.memory_sizes import format_size
from worker.model.corrections import longest_right_len
from worker.progress import LoadStage
from worker.startup.kernel_choice import kernels_of
from worker.startup.probing import Start, probe_shapes
from worker.startup.proving import prove_draft
from worker.startup.ready_model import ReadyModel
from worker.steps.draft_model import DraftSizes
from worker.steps.model_runner import EagerSteps, ModelRunner
from worker.worker_config import DraftMethod, WorkerConfig

log = logging.getLogger(__name__)


class LoadedDraft(NamedTuple):
    """A draft model in memory, before there is a cache."""

    start: Start
    runner: ModelRunner
    kept: KeptShapes


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
        start = Start(config=own, device=device, stage=stage, loaded=draft, runner=runner)
        return LoadedDraft(start, runner, probe_shapes(device, draft, runner))


def open_draft(
    config: WorkerConfig, draft: LoadedDraft, ready: ReadyModel[ModelRunner]
) -> tuple[EagerSteps, DraftSizes]:
    """Try the draft model over its part of the cache. Raises StartupError."""
    facts, start = ready.facts, draft.start
    loaded, device = start.loaded, start.device
    max_len = min(longest_right_len(loaded.text_config, loaded.checkpoint_len, None), facts.max_model_len)
    with naming_draft(config):
        backend = prove_draft(start, draft.kept, ready.measured.toolkit, ready.pools.cache, max_len)
    log.info(
        "draft model %s: weights %s, context %s tokens",
        *(loaded.model_type, format_size(loaded.weight_bytes), max_len),
    )
    sizes = DraftSizes(
        vocab_size=loaded.vocab_size,
        sampled_vocab_size=facts.vocab_size,
        max_len=max_len,
        max_tokens=_tokens_of_pass(start.config, kernels_of(device).saturating_tokens),
        num_blocks=facts.num_blocks,
        num_host_blocks=facts.num_host_blocks,
        has_state=bool(draft.kept.states),
    )
    return EagerSteps(draft.runner, backend, device), sizes


def _tokens_of_pass(config: WorkerConfig, saturating_tokens: int) -> int:
    """Find the most tokens of a pass: no more of a prompt than a step computes next to decodes."""
    most = config.max_num_batched_tokens
    return min(most, max(saturating_tokens, config.max_num_seqs)) if saturating_tokens else most
