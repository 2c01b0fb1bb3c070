"""Forecast of how memory will be divided, before the model is loaded.

Owns: the arithmetic of the load (ready_model.py). The KV layout of each layer is learned in the same way,
from one call of the model, but on tensors without content.
Never: reads weights beyond their headers, or allocates memory for them. The activations of a step are
measured at load only, so that on a GPU the forecast is an upper bound.
"""

from dataclasses import dataclass
from typing import Any

from worker.adapters.targets import Targets
from worker.attention.kv_cache import NOTHING_KEPT, BlockLayout, KeptShapes, cache_dtype, check_states
from worker.devices.device import Device
from worker.load.model_kind import (
    ModelKind,
    describe_division,
    torch_dtype,
)
from worker.load.model_sizes import head_layers, longest_len, vocab_size_of
from worker.load.weight_files import foreseen_weights
from worker.memory_sizes import CacheRequest, CacheSize, size_cache
from worker.model.corrections import longest_right_len
from worker.model.layer_parts import Unrecognised
from worker.model.layer_shards import bytes_of_a_rank, layout_of_stage, refuse_division, shard_layout
from worker.ranks.stage import ONLY_STAGE, Stage
from worker.startup.kernel_choice import foresee_pictures, kernels_of, refuse_kept
from worker.startup.start_adapters import most_bytes, stacked_bytes
from worker.survey.unloaded_model import foresee_layers
from worker.worker_config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Layout and size of the KV cache that a load is expected to allocate."""

    layout: BlockLayout
    size: CacheSize
    checkpoint_len: int
    """Longest context window of the model with enough memory."""
    adapter_targets: Targets
    """The layers that adapters can update; none where no adapters are asked for."""
    adapter_bytes: int
    """Most memory of adapters, in addition to the cache."""


def _bytes_on_a_device(
    config: WorkerConfig, kind: ModelKind, device: Device, model: Any, num_weight_bytes: int, stage: Stage
) -> int:
    """Size the weights on one device when the cache is sized, among them those that are not divided evenly.

    `model` is without content, and `stage` the one that the device has.
    """
    if config.num_devices == 1:
        return num_weight_bytes + foresee_pictures(model, torch_dtype(config.dtype, kind))
    evenly: int = sum(parameter.nbytes for parameter in model.parameters()) // config.num_devices
    beside = bytes_of_a_rank(model, config.num_ranks, stage) - evenly
    bytes_each: int = model.dtype.itemsize
    weights = foreseen_weights(config, kind, device)
    on_one = weights.on_one_of(config.num_devices, config.num_nodes)
    return on_one.total + beside * torch_dtype(config.dtype, kind).itemsize // bytes_each


def forecast(
    config: WorkerConfig,
    kind: ModelKind,
    device: Device,
    num_weight_bytes: int,
    beside: KeptShapes = NOTHING_KEPT,
) -> Forecast:
    """Forecast for a decoder that generates. Raises StartupError if it would not fit, and CannotForesee.

    `num_weight_bytes` are those of the draft model too, if there is one, and `beside` is what it keeps.
    """
    model, kept, targets = foresee_layers(config, kind, device)
    refuse_kept(model.config.model_type, kept, config, device)
    kept, dtype = kept.with_beside(beside), torch_dtype(config.dtype, kind)
    whole = BlockLayout(
        layers=kept.layers,
        state_shapes=kept.states,
        block_size=config.block_size or device.default_block_size,
        dtype=cache_dtype(config.kv_cache_dtype, dtype),
        together=kept.together,
    )
    check_states(whole)
    text_config = model.config.get_text_config(decoder=True)
    own_len = longest_len(text_config, config.max_model_len)
    checkpoint_len = longest_right_len(text_config, own_len, config.max_model_len)
    stages = _stages(config, model, len(whole.by_layer))
    layout = _layout_of_a_rank(whole, config, text_config, checkpoint_len, stages[0])
    is_stacked = kernels_of(device).stacks_adapters
    adapter_bytes = (stacked_bytes if is_stacked else most_bytes)(config, targets, dtype)

    def size_of(stage: Stage) -> CacheSize:
        num_bytes = _bytes_on_a_device(config, kind, device, model, num_weight_bytes, stage)
        budget_bytes = device.foreseen_budget_bytes(num_bytes)
        if is_stacked:
            budget_bytes = max(0, budget_bytes - adapter_bytes)
        return _size_of_cache(config, layout_of_stage(layout, stage).own, budget_bytes, checkpoint_len)

    sizes = map(size_of, stages if config.num_devices > 1 else [ONLY_STAGE])
    size = min(sizes, key=lambda each: each.num_blocks)
    device.check_swap_space(
        swap_bytes=config.swap_space_bytes,
        cache_bytes=size.num_blocks * layout.block_bytes * config.num_ranks // config.num_nodes,
    )
    return Forecast(
        layout=layout,
        size=size,
        checkpoint_len=checkpoint_len,
        adapter_targets=targets,
        adapter_bytes=adapter_bytes,
    )


def _size_of_cache(
    config: WorkerConfig, layout: BlockLayout, budget_bytes: int, checkpoint_len: int
) -> CacheSize:
    # A rank's own GPU has its own layers alone; what the ranks of a machine share has a part of all.
    num_memories = 1 if config.num_devices > 1 else config.num_nodes // config.num_gpus_of_a_stage
    return size_cache(
        CacheRequest(
            block_bytes=layout.block_bytes,
            block_size=layout.block_size,
            budget_bytes=budget_bytes * num_memories // config.num_ranks_on_device,
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            checkpoint_len=checkpoint_len,
            max_num_seqs=config.max_num_seqs,
            num_step_tokens=config.max_num_batched_tokens,
            groups=layout.groups,
        )
    )


def _stages(config: WorkerConfig, model: Any, num_layers: int) -> list[Stage]:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    text_config = model.config.get_text_config(decoder=True)
    head = head_layers(text_config, vocab_size_of(model), num_parameters, num_layers)
    return [Stage(index, config.num_stages, head_layers=head) for index in range(config.num_stages)]


def _layout_of_a_rank(
    layout: BlockLayout, config: WorkerConfig, text_config: Any, longest: int, stage: Stage
) -> BlockLayout:
    """Divide the layout among ranks, if there are several, and into groups. Raises StartupError."""
    try:
        found = layout_of_stage(shard_layout(layout, config.num_ranks, longest), stage).all_stages
    except Unrecognised as uneven:
        raise refuse_division(describe_division(config), str(uneven)) from uneven
    num_query_heads = getattr(text_config, "num_attention_heads", 0)
    if num_query_heads % config.num_ranks:
        raise refuse_division(describe_division(config), f"it has {num_query_heads} query heads")
    return found
