"""The memory that models need which share a device, before any of them is loaded.

Owns: the budget of a device for all models, and what one takes besides its KV cache.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from worker.devices.device import Device, open_device
from worker.doctor_findings import Finding, MemoryNeeds, Verdict
from worker.load.model_kind import find_kind
from worker.load.weight_files import weight_bytes
from worker.machine import available_memory_bytes
from worker.startup.kernel_choice import verifies_drafts
from worker.survey.draft_forecast import foresee_draft
from worker.survey.forecast import forecast
from worker.survey.unloaded_model import CannotForesee
from worker.worker_config import WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError, WorkerError, refused_as

_SHARE_OF_HOST = 0.7
"""Share of the memory that is available for all models on CPUs: steps and other programs need the rest."""
_PROCESS_BYTES = {"CPU": 256 << 20, "GPU": 600 << 20}
"""Libraries and buffers of a process; on a GPU its context."""
_SHARE_BESIDE = 0.1
"""Memory of a step, as a share of the weights: it is measured only at load."""
_MODEST_TOKENS = 4096
_FIX = "check the files of the model"


def survey_needs(configs: Sequence[WorkerConfig]) -> Iterator[MemoryNeeds | Finding]:
    """Yield the needs of each model, or the fault of one that cannot be loaded."""
    for config in configs:
        try:
            with refused_as(partial(StartupError, fix=_FIX), config.model_path):
                yield _needs_of(config)
        except WorkerError as error:
            refusal = error if isinstance(error, StartupError) else StartupError(str(error), fix=_FIX)
            what = f"{config.model_path}: {refusal.what}"
            yield Finding(topic="memory", verdict=Verdict.FAULT, what=what, fix=refusal.fix)


def _needs_of(config: WorkerConfig) -> MemoryNeeds:
    """Foresee one model. Raises StartupError."""
    device = open_device(config)
    kind = find_kind(config)
    num_bytes = weight_bytes(config, kind, device)
    token_bytes = least_bytes = most_bytes = 0
    if not kind.is_encoder:
        try:
            draft = foresee_draft(config, kind, device) if verifies_drafts(config, device) else None
            num_bytes += 0 if draft is None or draft.is_head else draft.weight_bytes
            found = forecast(config, kind, device, num_bytes, *([] if draft is None else [draft.kept]))
        except (CannotForesee, FamilyRefused):
            pass  # it gets what it measures, within the budget that the others leave
        else:
            layout = found.layout
            tokens = config.max_model_len or min(_MODEST_TOKENS, found.checkpoint_len)
            token_bytes = -(-layout.block_bytes // layout.block_size)
            least_bytes = (layout.most_blocks(tokens) + 1) * layout.block_bytes
            most_bytes = max(least_bytes, (found.size.num_blocks + 1) * layout.block_bytes)
    beside_bytes = _PROCESS_BYTES[device.kind] + int(num_bytes * _SHARE_BESIDE) + config.swap_space_bytes
    if config.kv_cache_bytes is not None or config.num_blocks is not None:
        least_bytes = most_bytes  # what was asked for is all there is to give
    num_here = config.num_engines if device.kind == "CPU" else 1  # each GPU has one
    return MemoryNeeds(
        device=str(device.torch_device),
        budget_bytes=_budget_bytes(config, device),
        fixed_bytes=num_here * (num_bytes + beside_bytes),
        token_bytes=num_here * token_bytes,
        least_bytes=num_here * least_bytes,
        most_bytes=num_here * most_bytes,
    )


def _budget_bytes(config: WorkerConfig, device: Device) -> int:
    if device.kind == "CPU":
        return int(available_memory_bytes() * _SHARE_OF_HOST)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device.torch_device)
    return max(0, int(total_bytes * config.gpu_memory_utilization) - (total_bytes - free_bytes))
