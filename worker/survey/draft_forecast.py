"""Forecast of the memory that a draft model, or a head of the checkpoint, takes before it is loaded."""

from dataclasses import dataclass
from typing import Any

from worker.attention.kv_cache import KeptShapes, LayerShape, with_hidden_states
from worker.checkpoint.checkpoint_files import find_checkpoint, find_weights, loaded_bytes
from worker.devices.device import Device
from worker.load.draft_kind import (
    check_vocabulary,
    draft_config,
    find_eagle,
    naming_draft,
    refuse_index_keys,
    refuse_scales_with_draft,
    refuse_uneven,
    refuse_with_head,
)
from worker.load.eagle_head import outline_eagle
from worker.load.model_kind import ModelKind, dtype_name, find_kind
from worker.load.weight_files import weight_bytes
from worker.startup.start_head import find_own_head
from worker.survey.unloaded_model import foresee_layers
from worker.worker_config import DraftMethod, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftForecast:
    """The memory that a draft model is expected to take."""

    weight_bytes: int
    kept: KeptShapes
    """Keys, values and states, which lie in each block behind those of the model."""
    is_head: bool = False
    """Whether its weights are among those of the checkpoint."""


def foresee_draft(config: WorkerConfig, kind: ModelKind, device: Device) -> DraftForecast | None:
    """Forecast for the draft model, if there is one. Raises StartupError, and CannotForesee."""
    method = config.speculation.method
    if method in (DraftMethod.AUTO, DraftMethod.MTP):
        with naming_draft(config):
            return _foresee_head(config, kind, device)
    if method is not DraftMethod.DRAFT_MODEL:
        return None
    own = draft_config(config, dtype_name(config.dtype, kind.checkpoint_config) or "float32")
    with naming_draft(config):
        if (content := find_eagle(config.speculation)) is not None:
            return _foresee_eagle(config, content, kind, device)
        refuse_scales_with_draft(config)
        draft_kind = find_kind(own)
        check_vocabulary(kind, draft_kind)
        num_bytes = weight_bytes(own, draft_kind, device)
        _, kept, _ = foresee_layers(own, draft_kind, device)
        refuse_uneven(kept, config.num_ranks)
        return DraftForecast(weight_bytes=num_bytes, kept=kept)


def _foresee_eagle(
    config: WorkerConfig, content: dict[str, Any], kind: ModelKind, device: Device
) -> DraftForecast:
    """Forecast for a head of EAGLE-3, of one layer, in a folder of its own."""
    refuse_with_head(config)
    folder = find_checkpoint(config.speculation.model_path)
    model, _, _ = foresee_layers(config, kind, device)
    layer = outline_eagle(folder, content, model)[0].body.config
    shape = LayerShape(layer.num_key_value_heads, layer.head_dim, layer.head_dim)
    num_bytes = loaded_bytes(find_weights(folder), dtype_name(config.dtype, kind.checkpoint_config)).total
    kept = with_hidden_states({0: shape}, layer.hidden_size, config.num_ranks)
    return DraftForecast(weight_bytes=num_bytes, kept=kept)


def _foresee_head(config: WorkerConfig, kind: ModelKind, device: Device) -> DraftForecast | None:
    """Forecast for the head of a checkpoint, whose layer keeps what the model's last one keeps."""
    stored = find_own_head(config, kind, find_weights(kind.folder), device)
    if stored is None:
        return None
    num_bytes = loaded_bytes(list(stored.files), dtype_name(config.dtype, kind.checkpoint_config)).total
    model, kept, _ = foresee_layers(config, kind, device)
    refuse_index_keys(model.config.model_type, kept)
    layer = {0: kept.layers[max(kept.layers)]}
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    kept = with_hidden_states(layer, hidden_size, config.num_ranks)
    return DraftForecast(weight_bytes=num_bytes, kept=kept, is_head=True)
