"""Start of a model: the choice among the three kinds of steps.

Owns: the order in which they are tried. A family that the paged KV cache cannot serve gets caches of its own.
"""

from worker.checkpoint.task import Task
from worker.devices.device import Device
from worker.load.draft_kind import refuse_speculation
from worker.load.model_kind import find_kind, refuse_ranks
from worker.own_cache.start import start_with_own_caches
from worker.progress import LoadStage
from worker.ranks.ranks import Ranks, is_divided
from worker.startup.start_adapters import refuse_adapters
from worker.startup.start_generation import start_generating
from worker.startup.start_pooling import start_pooling
from worker.steps.protocol import Steps
from worker.worker_config import ModelFacts, WorkerConfig
from worker.worker_errors import FamilyRefused


def start_steps(
    config: WorkerConfig, device: Device, stage: LoadStage, ranks: Ranks
) -> tuple[ModelFacts, Steps]:
    """Load the model and make it ready in the way that it needs. Raises StartupError."""
    device.make_current()
    kind = find_kind(config)
    refuse_ranks(config, kind)
    refuse_adapters(config, kind, device)
    if kind.task is not Task.GENERATE:
        refuse_speculation(config, "a model that pools generates no tokens to draft")
        return start_pooling(config, kind, device, stage)
    try:
        return start_generating(config, kind, device, stage, ranks)
    except FamilyRefused as error:
        if is_divided(ranks):
            raise
        refused = error.what  # not the error: its traceback keeps the model's memory alive
    refuse_speculation(config, f"{refused}, and a state that has taken in a draft cannot be taken back")
    return start_with_own_caches(config, kind, device, stage, refused)
