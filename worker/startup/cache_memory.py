"""Memory of a loaded model's KV cache: its needs and the free memory are measured, then pools allocated.

Owns: the order: layers are seen, kernels opened and adapters' layers found before the largest step is run;
one size of the pools for all ranks.
"""

from dataclasses import dataclass

import numpy as np
import torch

from worker.adapters.targets import Targets
from worker.attention.kv_cache import BlockLayout, KVCache
from worker.devices.device import Device, Reserve
from worker.memory_sizes import CacheRequest, CacheSize, num_host_blocks, size_cache
from worker.model.corrections import longest_right_len
from worker.model.layer_shards import DividedLayout, divide_layout, share_of_node
from worker.model.toolkit import Toolkit
from worker.progress import LoadPhase
from worker.ranks.ranks import Ranks
from worker.startup.kernel_choice import open_kernels
from worker.startup.probing import Start, largest_step, probe, probe_layout
from worker.startup.start_adapters import targets_of, with_adapters
from worker.steps.host_pool import HostPool
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements: the memory that a token takes, and that which is left for all of them."""

    whole_layout: BlockLayout
    """The blocks of all heads."""
    layouts: DividedLayout
    toolkit: Toolkit | None
    adapter_targets: Targets
    checkpoint_len: int
    """The longest sequence that can be right."""
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPools:
    """The pools, and the longest sequence that they serve."""

    max_model_len: int
    cache: KVCache
    host_pool: HostPool


def measure(start: Start, reserve: Reserve) -> Measured:
    """Find out what layers keep, open the kernels, and compute the largest step. Raises StartupError."""
    config, device, loaded = start.config, start.device, start.loaded
    checkpoint_len = longest_right_len(loaded.text_config, loaded.checkpoint_len, config.max_model_len)
    start.stage.enter(LoadPhase.MEASURING)
    whole_layout = probe_layout(start)
    layouts = divide_layout(whole_layout, loaded.ranks, loaded.head_layers, checkpoint_len)
    toolkit = open_kernels(config, device, start.stage, loaded)
    adapter_targets, reserve = _find_targets(start, reserve)
    if reserve.buffer_bytes:  # they were counted for one stripe
        num_places = checkpoint_len // whole_layout.block_size + 1
        num_entries = (len(layouts.own.stripes) - 1) * config.max_num_seqs * num_places
        reserve = reserve._replace(buffer_bytes=reserve.buffer_bytes + 2 * num_entries * np.int32().itemsize)
    budget_bytes = device.kv_cache_budget_bytes(largest_step(start, checkpoint_len), reserve=reserve)
    return Measured(
        whole_layout=whole_layout,
        layouts=layouts,
        toolkit=toolkit,
        adapter_targets=adapter_targets,
        checkpoint_len=checkpoint_len,
        budget_bytes=budget_bytes // config.num_ranks_on_device,
    )


def _find_targets(start: Start, reserve: Reserve) -> tuple[Targets, Reserve]:
    """Find what adapters can update, before any layer is replaced.

    Their memory is added to the reserve, and that of weights that are yet to be copied.
    """
    config, loaded = start.config, start.loaded
    targets = targets_of(
        config,
        start.device,
        loaded.model,
        lambda num: probe(start.runner, start.device, np.arange(num), num_logits=1),
    )
    bytes_to_come = loaded.weights.bytes_to_come // config.num_nodes
    reserve = reserve._replace(weight_bytes=reserve.weight_bytes + bytes_to_come)
    return targets, with_adapters(reserve, config, targets, loaded.dtype)


def open_pools(start: Start, measured: Measured) -> OpenPools:
    """Open the pools. All ranks take the smallest size: they have one scheduler. Raises StartupError."""
    config, ranks, layouts = start.config, start.loaded.ranks, measured.layouts
    size = size_cache(_cache_request(config, layouts, measured.budget_bytes, measured.checkpoint_len, ranks))
    size = CacheSize(
        num_blocks=ranks.agree_min(size.num_blocks), max_model_len=ranks.agree_min(size.max_model_len)
    )
    cache = _allocate(start.device, layouts.own, size)
    num_on_host = num_host_blocks(
        swap_bytes=int(config.swap_space_bytes / share_of_node(config, layouts.all_stages, ranks))
        // ranks.size,
        block_bytes=layouts.all_stages.block_bytes,
    )
    host_pool = HostPool(num_on_host * cache.layout.block_bytes, cache, start.device)
    return OpenPools(max_model_len=size.max_model_len, cache=cache, host_pool=host_pool)


def _cache_request(
    config: WorkerConfig, layouts: DividedLayout, budget_bytes: int, checkpoint_len: int, ranks: Ranks
) -> CacheRequest:
    layout = layouts.all_stages
    # On a device of its own a rank needs room for its own layers alone.
    on_device = layout if config.num_devices == 1 else layouts.own
    share = 1.0
    if config.num_devices == 1:  # `num_ranks_on_device` already counts only the ranks of one GPU
        share = share_of_node(config, layout, ranks) * config.num_gpus_of_a_stage
    return CacheRequest(
        block_bytes=on_device.block_bytes,
        block_size=layout.block_size,
        budget_bytes=int(budget_bytes / share),
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        checkpoint_len=checkpoint_len,
        max_num_seqs=config.max_num_seqs,
        num_step_tokens=config.max_num_batched_tokens,
        groups=layout.groups,
    )


def _allocate(device: Device, layout: BlockLayout, size: CacheSize) -> KVCache:
    numel = (size.num_blocks + 1) * layout.block_numel
    try:
        memory = device.zeros(numel, layout.storage)
    except (torch.OutOfMemoryError, MemoryError, OSError) as error:
        raise StartupError(
            f"{size.num_blocks} KV blocks of {layout.block_bytes} bytes cannot be allocated",
            fix="ask for fewer blocks, or let the worker measure",
        ) from error
    return KVCache(layout, size.num_blocks, memory)
