"""Load of the head of a checkpoint that drafts for its model."""

from dataclasses import replace
from typing import Any, NamedTuple

from worker.attention.kv_cache import KeptShapes, with_hidden_states
from worker.checkpoint.checkpoint_files import WeightFile, find_checkpoint, find_weights
from worker.devices.device import Device
from worker.devices.weight_life import WeightLife
from worker.load.draft_head import StoredHead, build_head, find_head, no_head
from worker.load.draft_kind import refuse_index_keys, refuse_uneven, refuse_with_head
from worker.load.eagle_head import build_eagle
from worker.load.loader import LoadedModel
from worker.load.model_kind import ModelKind
from worker.progress import LoadStage
from worker.speculation.head_layer import DraftHead
from worker.startup.kernel_choice import takes_heads_unasked, verifies_drafts
from worker.startup.probing import Start, probe_shapes
from worker.steps.model_runner import BodyRunner, ModelRunner
from worker.worker_config import DraftMethod, SpeculationConfig, WorkerConfig

LEAST_WITH_HEAD = 1 << 30
"""Bytes of a checkpoint from which on its head is taken by itself. Smaller ones lie in the processor's caches
in part: a step takes as much longer as it has tokens, and what the interpreter does for a pass counts."""


class LoadedDraft(NamedTuple):
    """A draft model in memory, before there is a cache."""

    start: Start
    runner: ModelRunner | BodyRunner
    kept: KeptShapes
    """Keys and values; the last layer of a head's is of the model's hidden states."""
    head: DraftHead | None = None
    """The head, if it is one; `start` and `runner` are then those of its layer."""


def find_own_head(
    config: WorkerConfig, kind: ModelKind, files: list[WeightFile], device: Device
) -> StoredHead | None:
    """Find the head of a checkpoint; None where there is none and none was asked for.

    Raises StartupError for one that cannot be taken. On ranks and GPUs one is taken only if asked for.
    """
    is_asked = config.speculation.method is not DraftMethod.AUTO
    is_large = sum(each.num_bytes for each in files) >= LEAST_WITH_HEAD
    if not (is_asked or (is_large and takes_heads_unasked(config, device))):
        return None
    stored = find_head(kind, files)
    if stored is None and config.speculation.method is DraftMethod.MTP:
        raise no_head(kind)
    if stored is None:
        return None
    verifies_drafts(replace(config, speculation=SpeculationConfig(method=DraftMethod.MTP)), device)
    refuse_with_head(config)
    return stored


def load_head(
    config: WorkerConfig, kind: ModelKind, loaded: LoadedModel, device: Device
) -> LoadedDraft | None:
    """Load the head of the checkpoint as one layer of the model's family. Raises StartupError."""
    files = find_weights(kind.folder)
    stored = find_own_head(config, kind, files, device)
    if stored is None:
        return None
    return _loaded(config, loaded, device, build_head(kind, stored, loaded.model), files)


def load_eagle(
    config: WorkerConfig, content: dict[str, Any], loaded: LoadedModel, device: Device
) -> LoadedDraft:
    """Load a head of EAGLE-3 from the draft model's folder. Raises StartupError."""
    refuse_with_head(config)
    folder = find_checkpoint(config.speculation.model_path)
    head = build_eagle(folder, content, loaded.model)
    return _loaded(config, loaded, device, head, find_weights(folder))


def _loaded(
    config: WorkerConfig, loaded: LoadedModel, device: Device, head: DraftHead, files: list[WeightFile]
) -> LoadedDraft:
    runner = BodyRunner(head.body, head.body)
    layer = replace(
        loaded,
        model=head.body,
        text_config=head.body.config,
        num_parameters=sum(each.numel() for each in head.own_parameters),
        weight_bytes=head.num_bytes,
        weights=WeightLife(head, device, [file.path for file in files]),
        has_experts=head.has_experts,
    )
    stage = LoadStage()  # the bar is the model's
    start = Start(config=config, device=device, stage=stage, loaded=layer, runner=runner)
    kept = probe_shapes(device, layer, runner)
    refuse_index_keys(loaded.model_type, kept)
    layer.weights.settle(stage)
    refuse_uneven(kept, loaded.ranks.size)
    kept = with_hidden_states(kept.layers, head.body.config.hidden_size, loaded.ranks.size)
    states = max(kept.layers)
    start = replace(start, loaded=replace(layer, beside=KeptShapes({states: kept.layers[states]}, {})))
    return LoadedDraft(start, runner, kept, head)
