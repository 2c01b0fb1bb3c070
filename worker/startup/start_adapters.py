"""Start of the adapters of a model that generates.

Owns: the order: the layers that can be updated are found before any is replaced; after that every one of them
is made computable, and the adapters of the command line are loaded. Their memory is checked against the
memory that the KV cache leaves.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from worker.adapters.store import AdaptableModel, AdapterStore
from worker.adapters.targets import AdapterWay, Targets, adaptable_parts, find_targets, in_torch
from worker.checkpoint.task import Task
from worker.devices.device import Device, Reserve
from worker.load.loader import LoadedModel
from worker.load.model_kind import ModelKind
from worker.machine import available_memory_bytes
from worker.memory_sizes import format_size
from worker.pictures.eyes import has_eyes
from worker.startup.kernel_choice import kernels_of
from worker.steps.model_runner import ModelRunner
from worker.worker_config import AdapterFacts, WorkerConfig, padded_rank
from worker.worker_errors import AdapterRefused, StartupError

log = logging.getLogger(__name__)

_NUM_TOKENS = 3
_OPTIONS = "--lora-modules and --lora-directory"
_LEFT_OUT = "leave them out"


def refuse_adapters(config: WorkerConfig, kind: ModelKind, device: Device) -> None:
    """Raise StartupError where adapters are asked for and not computed."""
    if not config.adapter_limits.max_in_step:
        return
    if reason := kernels_of(device).obstacle_to_adapters(config):
        raise StartupError(
            f"{_OPTIONS}: adapters on a GPU need its kernels, and there are none: {reason}",
            fix=f"leave --gpu-kernels on, add --device cpu, or {_LEFT_OUT}",
        )
    if kind.task is not Task.GENERATE:
        raise StartupError(
            f"{_OPTIONS}: this model is made to {kind.task.value}, and adapters are computed for models that "
            "generate",
            fix=_LEFT_OUT,
        )


def refuse_adapters_alone(config: WorkerConfig, device: Device, why: str) -> None:
    """Raise StartupError where a GPU computes one sequence after the other; `why` it does."""
    if config.adapter_limits.max_in_step and kernels_of(device).stacks_adapters:
        raise StartupError(
            f"{_OPTIONS}: {why}, and such models compute adapters on CPUs only",
            fix=f"add --device cpu, or {_LEFT_OUT}",
        )


def targets_of(
    config: WorkerConfig, device: Device, model: nn.Module, run: Callable[[int], object]
) -> Targets:
    """Find the layers that can be updated; `run` calls the model with a number of tokens."""
    if not config.adapter_limits.max_in_step:
        return Targets({}, {}, {})
    targets = find_targets(model, lambda: run(_NUM_TOKENS), num_tokens=_NUM_TOKENS)
    if kernels_of(device).stacks_adapters:
        targets = targets.without_latents(model, "updates of what expands latents are computed on CPUs only")
        targets = targets.without_experts("updates of experts are computed on CPUs only")
    return replace(targets, reads_pictures=config.num_stages == 1 and has_eyes(model))


def with_adapters(reserve: Reserve, config: WorkerConfig, targets: Targets, dtype: torch.dtype) -> Reserve:
    """Add the memory of adapters to the reserve of a GPU: that of all slots, at the start."""
    return reserve._replace(buffer_bytes=reserve.buffer_bytes + stacked_bytes(config, targets, dtype))


def stacked_bytes(config: WorkerConfig, targets: Targets, dtype: torch.dtype) -> int:
    """Size the adapters of all slots of a GPU, whose ranks are padded; of shards at most, as `most_bytes`."""
    limits = config.adapter_limits
    padded = replace(limits, max_rank=padded_rank(limits.max_rank))
    return config.num_ranks_on_device * targets.num_bytes(padded, dtype)


def open_adapters(
    config: WorkerConfig,
    loaded: LoadedModel,
    targets: Targets,
    way: AdapterWay | None = None,
    *,
    cache_bytes: int | None,
) -> tuple[AdapterStore | None, tuple[AdapterFacts, ...]]:
    """Load the adapters of the command line. Raises StartupError with the name of one that does not fit.

    `cache_bytes` are those of a cache in the host's memory, where adapters are too; None: memory for these
    was reserved before.
    """
    limits, way = config.adapter_limits, way or in_torch()
    if not limits.max_in_step:
        return None, ()
    if not targets.sizes:
        raise StartupError(f"{_OPTIONS}: {loaded.model_type} has no layers to update", fix=_LEFT_OUT)
    if cache_bytes is not None:
        _check_memory(config, most_bytes(config, targets, loaded.dtype), cache_bytes)
    parts = tuple(adaptable_parts(loaded.model, targets, way, limits.max_in_memory))
    model = AdaptableModel(targets, parts, way.step, loaded.dtype)
    store = AdapterStore(model, limits, max_num_seqs=config.max_num_seqs, ranks=loaded.ranks)
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


def open_generator_adapters(
    config: WorkerConfig,
    loaded: LoadedModel,
    targets: Targets,
    runner: ModelRunner,
    device: Device,
    cache_bytes: int,
) -> tuple[AdapterStore | None, tuple[AdapterFacts, ...]]:
    """Load the adapters of a model with a paged cache: by kernels where the device stacks them."""
    if not kernels_of(device).stacks_adapters or not config.adapter_limits.max_in_step:
        return open_adapters(config, loaded, targets, cache_bytes=cache_bytes)
    from worker.gpu.triton_adapters import adapters_by_triton  # only here: Triton is not on every machine

    way = adapters_by_triton(config, runner, device, dtype=loaded.dtype)
    return open_adapters(config, loaded, targets, way, cache_bytes=None)


def most_bytes(config: WorkerConfig, targets: Targets, dtype: torch.dtype) -> int:
    """Size the adapters of all ranks of a machine at most: no shard has more of an update than the whole."""
    return -(-config.num_ranks * targets.num_bytes(config.adapter_limits, dtype) // config.num_nodes)


def _check_memory(config: WorkerConfig, num_bytes: int, cache_bytes: int) -> None:
    limits = config.adapter_limits
    # Caches are allocated, but their pages count as free until they are written; so does what others load.
    num_processes = config.num_ranks * config.num_stages * config.num_engines // config.num_nodes
    left_bytes = (available_memory_bytes() - cache_bytes * num_processes) // config.num_engines
    log.info("up to %s adapters in memory: %s at most", limits.max_in_memory, format_size(num_bytes))
    if num_bytes > left_bytes:
        raise StartupError(
            f"{limits.max_in_memory} adapters of rank {limits.max_rank} take up to "
            f"{format_size(num_bytes)}, and {format_size(max(0, left_bytes))} are left by the KV cache",
            fix="ask for a smaller --max-cpu-loras, --max-lora-rank or --kv-cache-memory",
        )
