"""Forecast of the memory that a draft model takes, before it is loaded.

Never: checks whether it fits (forecast.py).
"""

from dataclasses import dataclass

from worker.attention.kv_cache import KeptShapes
from worker.devices.device import Device
from worker.load.draft_kind import (
    check_vocabulary,
    draft_config,
    naming_draft,
    refuse_scales_with_draft,
)
from worker.load.model_kind import ModelKind, dtype_name, find_kind
from worker.load.weight_files import weight_bytes
from worker.survey.unloaded_model import foresee_layers
from worker.worker_config import DraftMethod, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftForecast:
    """The memory that a draft model is expected to take."""

    weight_bytes: int
    kept: KeptShapes
    """Keys, values and states, which lie in each block behind those of the model."""


def foresee_draft(config: WorkerConfig, kind: ModelKind, device: Device) -> DraftForecast | None:
    """Forecast for the draft model, if there is one. Raises StartupError, and CannotForesee."""
    if config.speculation.method is not DraftMethod.DRAFT_MODEL:
        return None
    refuse_scales_with_draft(config)
    own = draft_config(config, dtype_name(config.dtype, kind.checkpoint_config) or "float32")
    with naming_draft(config):
        draft_kind = find_kind(own)
        check_vocabulary(kind, draft_kind)
        num_bytes = weight_bytes(own, draft_kind, device)
        _, kept, _ = foresee_layers(own, draft_kind, device)
        return DraftForecast(weight_bytes=num_bytes, kept=kept)
