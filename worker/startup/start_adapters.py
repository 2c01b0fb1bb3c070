"""Start of the adapters of a model that generates.

Owns: the order: the layers that can be updated are found before any is replaced; after that every one of them
is made computable, and the adapters of the command line are loaded. Their memory is checked against what is
left beside the KV cache.
Never: reads an adapter (adapters/adapter_files.py).
"""

import logging
from collections.abc import Callable

from torch import nn

from worker.adapters.adapted_linear import StepAdapters
from worker.adapters.adapter_store import AdapterStore
from worker.adapters.adapter_targets import Targets, adaptable_parts, find_targets
from worker.checkpoint.task import Task
from worker.devices.device import Device
from worker.machine import available_memory_bytes
from worker.memory_sizes import format_size
from worker.startup.loader import LoadedModel, ModelKind
from worker.worker_config import AdapterFacts, WorkerConfig
from worker.worker_errors import AdapterRefused, StartupError

log = logging.getLogger(__name__)

_NUM_TOKENS = 3
_OPTIONS = "--lora-modules and --lora-directory"
_LEFT_OUT = "leave them out"


def refuse_adapters(config: WorkerConfig, kind: ModelKind, device: Device) -> None:
    """Raise StartupError where adapters are asked for and not computed."""
    if not config.adapter_limits.max_in_step:
        return
    if device.torch_device.type != "cpu":
        raise StartupError(
            f"{_OPTIONS}: adapters are computed on CPUs only so far", fix=f"add --device cpu, or {_LEFT_OUT}"
        )
    if config.num_ranks > 1 or config.num_stages > 1:
        raise StartupError(
            f"{_OPTIONS}: layers that are divided (--tensor-parallel-size, --pipeline-parallel-size) compute "
            "no adapters yet",
            fix=f"use one rank, or {_LEFT_OUT}",
        )
    if kind.task is not Task.GENERATE:
        raise StartupError(
            f"{_OPTIONS}: this model is made to {kind.task.value}, and adapters are computed for models that "
            "generate",
            fix=_LEFT_OUT,
        )


def targets_of(config: WorkerConfig, model: nn.Module, run: Callable[[int], object]) -> Targets:
    """Find the layers that can be updated; `run` calls the model with so many tokens."""
    if not config.adapter_limits.max_in_step:
        return Targets({}, {})
    return find_targets(model, lambda: run(_NUM_TOKENS), num_tokens=_NUM_TOKENS)


def open_adapters(
    config: WorkerConfig, loaded: LoadedModel, targets: Targets, *, cache_bytes: int
) -> tuple[AdapterStore | None, tuple[AdapterFacts, ...]]:
    """Load the adapters of the command line. Raises StartupError with the name of one that does not fit."""
    limits = config.adapter_limits
    if not limits.max_in_step:
        return None, ()
    if not targets.sizes:
        raise StartupError(f"{_OPTIONS}: {loaded.model_type} has no layers to update", fix=_LEFT_OUT)
    _check_memory(config, targets.num_bytes(config.adapter_limits, loaded.dtype), cache_bytes)
    step = StepAdapters()
    model: nn.Module = loaded.model
    store = AdapterStore(
        targets,
        adaptable_parts(model, targets, step, limits.max_in_memory),
        step,
        limits,
        dtype=loaded.dtype,
        max_num_seqs=config.max_num_seqs,
    )
    facts = []
    for adapter in config.adapters:
        try:
            facts.append(store.load(adapter.name, adapter.folder))
        except AdapterRefused as refusal:
            raise StartupError(
                f"adapter {adapter.name} in {adapter.folder}: {refusal}",
                fix="correct it, or leave it out of --lora-modules",
            ) from refusal
    return store, tuple(facts)


def _check_memory(config: WorkerConfig, most_bytes: int, cache_bytes: int) -> None:
    limits = config.adapter_limits
    # The cache is allocated, but its pages count as free until they are written.
    left_bytes = available_memory_bytes() - cache_bytes
    log.info("up to %s adapters in memory: %s at most", limits.max_in_memory, format_size(most_bytes))
    if most_bytes > left_bytes:
        raise StartupError(
            f"{limits.max_in_memory} adapters of rank {limits.max_rank} take up to "
            f"{format_size(most_bytes)}, and {format_size(max(0, left_bytes))} are left beside the KV cache",
            fix="ask for a smaller --max-cpu-loras, --max-lora-rank or --kv-cache-memory",
        )
