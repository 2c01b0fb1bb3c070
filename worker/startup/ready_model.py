"""The way from loaded weights to a model that is ready to run steps.

Owns: the order of the start. One call of the model shows the keys and values that each layer keeps, which
gives the layout of the cache; the memory that is left gives its size; the size gives the longest sequence.
At the end the whole is tried (self_check.py), and copies between the pools are timed.
Never: runs a plan, or asks for the kind of its device (kernel_choice.py).
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor

from scheduler.cache_groups import CacheGroup, Lifetime
from worker.adapters.adapter_targets import Targets
from worker.attention.interface import AttentionBackend
from worker.attention.kv_cache import (
    FLOAT8,
    BlockLayout,
    KVCache,
    LayerShape,
    cache_dtype,
    scale_for,
    with_layers_beside,
)
from worker.attention.probe_attention import ProbeAttention
from worker.attention.ref_attention import RefAttention
from worker.checkpoint.checkpoint_files import find_weights
from worker.devices.device import NO_RESERVE, Device, Reserve
from worker.memory_sizes import CacheRequest, CacheSize, format_size, num_host_blocks, size_cache
from worker.model.layer_parts import Unrecognised
from worker.model.layer_shards import refuse_division, shard_layout
from worker.model.quantization import rounding_of
from worker.model.quantized_layers import Codes, describe_codes, find_codes, skipping_products
from worker.model.rope import fix_rope, longest_right_len
from worker.model.surgery import Surgery, put_kernels_under
from worker.model.temperature import fix_temperatures
from worker.model.toolkit import Toolkit
from worker.progress import LoadPhase, LoadStage
from worker.ranks.ranks import Ranks, is_divided
from worker.startup.kernel_choice import kernels_of
from worker.startup.loader import (
    NO_PAGED_ATTENTION,
    LoadedModel,
    bring_weights,
    describe_division,
    refusing_out_of_memory,
)
from worker.startup.self_check import LONGEST_CHECK, Runner, SelfCheck, refusing
from worker.startup.start_adapters import targets_of, with_adapters
from worker.steps.host_pool import HostPool
from worker.steps.step_tokens import StepTokens
from worker.worker_config import ModelFacts, WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError

log = logging.getLogger(__name__)

_MEASURED_TOKENS = 128
_SEED = 17

AnyRunner = TypeVar("AnyRunner", bound=Runner)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel(Generic[AnyRunner]):
    """A model with its cache and its attention backend."""

    facts: ModelFacts
    cache: KVCache
    host_pool: HostPool
    runner: AnyRunner
    backend: AttentionBackend
    toolkit: Toolkit | None
    """Our own kernels; None where torch computes all."""
    adapter_targets: Targets
    """The layers that adapters can update."""
    surgery: Surgery | None
    """The layers that our own kernels compute; None where torch computes all."""


class _Layouts(NamedTuple):
    """The blocks of one rank's heads."""

    all_stages: BlockLayout
    own: BlockLayout
    """Layers of its stage alone."""


def start_loaded(
    config: WorkerConfig,
    device: Device,
    stage: LoadStage,
    loaded: LoadedModel,
    runner: AnyRunner,
    *,
    reserve: Reserve = NO_RESERVE,
) -> ReadyModel[AnyRunner]:
    """Measure, allocate and try a loaded model; `reserve` is for after the cache. Raises StartupError."""
    checkpoint_len = longest_right_len(loaded.text_config, loaded.checkpoint_len, config.max_model_len)
    ranks = loaded.ranks
    stage.enter(LoadPhase.MEASURING)
    whole_layout = _probe_layout(config, device, loaded, runner)
    layouts, (toolkit, loaded) = _divide(loaded, whole_layout), _open_toolkit(config, device, loaded, stage)
    adapter_targets, reserve = _find_targets(config, device, loaded, runner, reserve)
    largest_step = _largest_step(config, device, loaded, runner, checkpoint_len)
    budget_bytes = device.kv_cache_budget_bytes(largest_step, reserve=reserve) // config.num_ranks_on_device
    size = _agreed(_size(config, layouts, budget_bytes, checkpoint_len, ranks), ranks)
    cache = _allocate(device, layouts.own, size)
    host_pool = _open_host_pool(config, device, layouts, cache, ranks)
    _correct(loaded, size.max_model_len)
    stage.enter(LoadPhase.WARMING_UP)
    whole_cache = _small_cache(device, whole_layout) if is_divided(ranks) else cache
    check = SelfCheck(
        loaded=loaded,
        runner=runner,
        backend=RefAttention(whole_cache, device),
        cache=whole_cache,
        device=device,
        max_model_len=size.max_model_len,
    )
    expected = check.run()
    stored_codes = find_codes(loaded.model)
    surgery = None
    if toolkit is not None:
        check = replace(check, cache=cache, backend=toolkit.attention_over(cache))
        surgery = _put_kernels(config, toolkit, check, expected, stage, must_round_inputs=True)
    _log_codes(loaded, stored_codes)
    facts = _facts(device, loaded, cache, size, host_pool, whole_layout.lifetime)
    return ReadyModel(
        facts=_with_kernels(facts, surgery),
        cache=cache,
        host_pool=host_pool,
        runner=runner,
        backend=check.backend,
        toolkit=toolkit,
        adapter_targets=adapter_targets,
        surgery=surgery,
    )


def _correct(loaded: LoadedModel, max_model_len: int) -> None:
    """Correct what transformers' model computes wrongly in a batch of several lengths."""
    fix_rope(loaded.model, loaded.text_config, max_model_len)
    fix_temperatures(loaded.model)


def start_beside(config: WorkerConfig, toolkit: Toolkit | None, check: SelfCheck) -> AttentionBackend:
    """Try a second model over its part of a cache, and put kernels under it. Raises StartupError."""
    _correct(check.loaded, check.max_model_len)
    expected = check.run()
    if toolkit is None:
        return check.backend
    backend = toolkit.attention_over(check.cache)
    # Options are the model's: they need not have an effect on the one beside.
    check = replace(check, backend=backend)
    stage = LoadStage()  # the bar is the model's
    _put_kernels(config, toolkit, check, expected, stage, must_round_inputs=False)
    return backend


def _open_host_pool(
    config: WorkerConfig, device: Device, layouts: _Layouts, cache: KVCache, ranks: Ranks
) -> HostPool:
    """Make a pool of as many blocks as each stage has. Raises StartupError."""
    num_blocks = num_host_blocks(
        swap_bytes=int(config.swap_space_bytes / _share_of_node(config, layouts.all_stages, ranks))
        // ranks.size,
        block_bytes=layouts.all_stages.block_bytes,
    )
    return HostPool(num_blocks * cache.layout.block_bytes, cache, device)


def _log_codes(loaded: LoadedModel, stored: dict[str, Codes]) -> None:
    """Log what computes with the weights that the checkpoint holds as codes."""
    for line in describe_codes(stored, find_codes(loaded.model)):
        log.info("%s", line)


def _put_kernels(
    config: WorkerConfig,
    toolkit: Toolkit,
    check: SelfCheck,
    expected: Tensor,
    stage: LoadStage,
    *,
    must_round_inputs: bool,
) -> Surgery:
    """Prove the products, replace layers, by the shards of this rank where there are several, and try them.

    Raises StartupError.
    """
    with toolkit.refusing_kernels(), refusing_out_of_memory(check.device, "kernels took over the weights"):
        toolkit.prove(check.loaded.model, must_round_inputs=must_round_inputs)
        surgery = _operate(config, toolkit, check, stage)
        check.run_again(check.backend, expected, tolerance=rounding_of(config).tolerance)
    return surgery


def _operate(config: WorkerConfig, toolkit: Toolkit, check: SelfCheck, stage: LoadStage) -> Surgery:
    loaded = check.loaded
    loaded.put_off()
    surgery = put_kernels_under(
        loaded.model,
        toolkit,
        check.device,
        max_model_len=check.max_model_len,
        ranks=loaded.ranks,
        free_behind=loaded.free_behind,
    )
    log.info("%s", surgery.describe())
    _refuse_unquantized(config, surgery)
    if is_divided(loaded.ranks):
        _refuse_undivided(config, check, surgery)
    bring_weights(loaded, check.device, stage)
    stage.enter(LoadPhase.WARMING_UP)
    return surgery


def _open_toolkit(
    config: WorkerConfig, device: Device, loaded: LoadedModel, stage: LoadStage
) -> tuple[Toolkit | None, LoadedModel]:
    """Open the kernels, and the exchange of ranks, which needs them; without any, copy the weights.

    Raises StartupError.
    """
    toolkit = kernels_of(device).open_toolkit(config, device, loaded.dtype, stage)
    if not is_divided(loaded.ranks):
        if toolkit is None:
            loaded = bring_weights(loaded, device, stage)
            stage.enter(LoadPhase.MEASURING)
        return toolkit, loaded
    if toolkit is None:
        raise StartupError(
            f"{describe_division(config)} needs the {device.kind} kernels, and there are none",
            fix=kernels_of(device).fix_of_ranks,
        )
    toolkit.divide_among(loaded.ranks)
    loaded.ranks.check_same("software and checkpoint", _describe_origin(config))
    loaded.ranks.check_same("devices", device.describe())
    stage.enter(LoadPhase.MEASURING)
    return toolkit, loaded


def _describe_origin(config: WorkerConfig) -> str:
    """Name the versions and files that the shards of all ranks must come from."""
    words = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    if config.model_path:
        for file in find_weights(Path(config.model_path)):
            words.append(f"{file.path.name} {file.num_bytes}")
            if config.num_nodes == 1:  # else contents were compared when a node came: times differ there
                words.append(str(file.path.stat().st_mtime_ns))
    return ", ".join(words)


def _divide(loaded: LoadedModel, layout: BlockLayout) -> _Layouts:
    """Keep the heads and layers of one rank. Raises StartupError where they cannot be divided."""
    ranks = loaded.ranks
    if ranks.stage.count > 1:
        ranks.stage = replace(ranks.stage, head_layers=loaded.head_layers(len(layout.layers)))
    try:
        divided = shard_layout(layout, ranks.size)
        return _Layouts(divided, _of_stage(divided, ranks))
    except Unrecognised as uneven:
        raise refuse_division(f"--tensor-parallel-size {ranks.size}", str(uneven)) from uneven


def _of_stage(layout: BlockLayout, ranks: Ranks) -> BlockLayout:
    """Keep the layers of one stage. Raises StartupError where there are fewer than stages."""
    num_layers, stage = len(layout.layers), ranks.stage
    if num_layers < stage.count:
        raise refuse_division(f"--pipeline-parallel-size {stage.count}", f"it has {num_layers} layers")
    return layout.only(stage.layers_of(num_layers))


def _share_of_node(config: WorkerConfig, layout: BlockLayout, ranks: Ranks) -> float:
    """Count the blocks' bytes that are on this node, of those on all."""
    if config.num_nodes == 1:
        return 1.0
    num_layers, stage = len(layout.layers), ranks.stage
    stages = [replace(stage, index=index) for index in stage.node_of(config.num_nodes)]
    own = layout.only(place for each in stages for place in each.layers_of(num_layers))
    nodes_of_a_stage = max(1, config.num_nodes // stage.count)
    return own.block_bytes / layout.block_bytes / nodes_of_a_stage


def _agreed(size: CacheSize, ranks: Ranks) -> CacheSize:
    """Take the smallest size of all ranks: one scheduler plans for all of them."""
    return CacheSize(
        num_blocks=ranks.agree_min(size.num_blocks), max_model_len=ranks.agree_min(size.max_model_len)
    )


def _find_targets(
    config: WorkerConfig, device: Device, loaded: LoadedModel, runner: Runner, reserve: Reserve
) -> tuple[Targets, Reserve]:
    """Find what adapters can update, before any layer is replaced.

    Their memory is added to what is reserved, and that of weights that are yet to be copied.
    """
    targets = targets_of(
        config, device, loaded.model, lambda num: _probe(runner, device, np.arange(num), num_logits=1)
    )
    reserve = reserve._replace(weight_bytes=loaded.bytes_to_come // config.num_nodes)
    return targets, with_adapters(reserve, config, targets, loaded.dtype)


def _small_cache(device: Device, layout: BlockLayout) -> KVCache:
    """Make a cache of whole heads for the check of the model before it is divided."""
    num_blocks = -(-LONGEST_CHECK // layout.block_size)
    memory = device.zeros((num_blocks + 1) * layout.block_numel, layout.storage)
    return KVCache(layout, num_blocks, memory)


def _refuse_undivided(config: WorkerConfig, check: SelfCheck, surgery: Surgery) -> None:
    """Raise StartupError if a layer with keys and values stayed whole."""
    ranks = check.loaded.ranks
    ranks.check_same("layers", f"{surgery.num_fused} of {surgery.num_layers} divided")
    has_whole_experts = surgery.experts.num_replaced < surgery.experts.num_found
    num_own = len(ranks.stage.layers_of(surgery.num_layers))
    is_whole = surgery.num_fused < surgery.num_layers or num_own < len(check.cache.layout.layers)
    if is_whole or has_whole_experts:
        raise refuse_division(describe_division(config), surgery.describe())


def _largest_step(
    config: WorkerConfig, device: Device, loaded: LoadedModel, runner: Runner, checkpoint_len: int
) -> Callable[[], None]:
    """Make a step of the most tokens, whose memory is measured."""
    num_tokens = config.max_num_batched_tokens
    positions = np.arange(num_tokens) % checkpoint_len

    def run() -> None:
        with refusing(loaded.model_type):
            _probe(runner, device, positions, num_logits=min(config.max_num_seqs, num_tokens))

    return run


def _refuse_unquantized(config: WorkerConfig, surgery: Surgery) -> None:
    quantization = rounding_of(config).layers
    if quantization is not None and surgery.num_fused == surgery.num_kept_mlps:
        weights = "the MLPs of this model" if surgery.num_fused else "this model"
        raise StartupError(
            f"--quantization {quantization.word} has no effect on {weights} ({surgery.describe()})",
            fix="leave it out, or serve a model whose layers can be fused (docs/models.md)",
        )


def _probe(
    runner: Runner,
    device: Device,
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
    *,
    num_logits: int,
) -> ProbeAttention:
    """Run one sequence without a cache."""
    num_tokens = len(positions)
    probe = ProbeAttention()
    wanted = np.arange(num_tokens - num_logits, num_tokens)
    runner.forward(StepTokens.of(device, np.zeros(num_tokens, np.int64), positions, wanted), probe)
    return probe


def probe_shapes(device: Device, loaded: LoadedModel, runner: Runner) -> dict[int, LayerShape]:
    """Read each layer's shape from one call. Raises StartupError if the model calls another attention."""
    with refusing(loaded.model_type), skipping_products():
        probe = _probe(runner, device, np.arange(2), num_logits=1)
    if not probe.shapes:
        raise FamilyRefused(f"{loaded.model_type} {NO_PAGED_ATTENTION}")
    return dict(sorted(probe.shapes.items()))


def _probe_layout(config: WorkerConfig, device: Device, loaded: LoadedModel, runner: Runner) -> BlockLayout:
    dtype = cache_dtype(config.kv_cache_dtype, loaded.dtype)
    return BlockLayout(
        layers=with_layers_beside(probe_shapes(device, loaded, runner), loaded.layers_beside),
        block_size=config.block_size or device.default_block_size,
        dtype=dtype,
        scales=_measure_scales(device, loaded, runner) if dtype is FLOAT8 else {},
    )


def _measure_scales(device: Device, loaded: LoadedModel, runner: Runner) -> dict[int, tuple[float, float]]:
    """Find the scales of each layer's keys and values from a sequence of random tokens."""
    length = min(_MEASURED_TOKENS, loaded.checkpoint_len)
    token_ids = np.random.default_rng(_SEED).integers(0, loaded.vocab_size, length)
    probe = ProbeAttention()
    with refusing(loaded.model_type):
        tokens = StepTokens.of(device, token_ids, np.arange(length), np.array([length - 1]))
        runner.forward(tokens, probe)
    scales = {}
    for layer_idx, (key, value) in probe.largest.items():
        sizes = float(key), float(value)
        if not all(map(math.isfinite, sizes)):
            raise StartupError(
                f"layer {layer_idx} has keys or values that are not finite: they have no scale for fp8",
                fix="leave --kv-cache-dtype out",
            )
        scales[layer_idx] = scale_for(sizes[0]), scale_for(sizes[1])
    return scales


def _size(
    config: WorkerConfig, layouts: _Layouts, budget_bytes: int, checkpoint_len: int, ranks: Ranks
) -> CacheSize:
    layout = layouts.all_stages
    lifetime = layout.lifetime
    most_read_tokens = lifetime.num_tokens + config.max_num_batched_tokens if lifetime.is_limited else None
    # On a device of its own a rank needs room for its own layers alone.
    on_device = layout if config.num_devices == 1 else layouts.own
    share = 1.0
    if config.num_devices == 1:  # `num_ranks_on_device` already counts only the ranks of one GPU
        share = _share_of_node(config, layout, ranks) * config.num_gpus_of_a_stage
    return size_cache(
        CacheRequest(
            block_bytes=on_device.block_bytes,
            block_size=layout.block_size,
            budget_bytes=int(budget_bytes / share),
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            checkpoint_len=checkpoint_len,
            max_num_seqs=config.max_num_seqs,
            most_read_tokens=most_read_tokens,
        )
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


def _with_kernels(facts: ModelFacts, surgery: Surgery | None) -> ModelFacts:
    return replace(facts, kernels=surgery.kernels) if surgery is not None and surgery.num_fused else facts


def _facts(
    device: Device,
    loaded: LoadedModel,
    cache: KVCache,
    size: CacheSize,
    host_pool: HostPool,
    lifetime: Lifetime,
) -> ModelFacts:
    facts = ModelFacts(
        model_type=loaded.model_type,
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=device.describe(),
        vocab_size=loaded.vocab_size,
        max_model_len=size.max_model_len,
        block_size=cache.layout.block_size,
        num_blocks=size.num_blocks,
        kv_cache_bytes=cache.num_bytes,
        groups=(CacheGroup(lifetime),),
        num_host_blocks=host_pool.num_blocks,
        copy_s_per_block=host_pool.measure_copy_s(),
        # Each expert of a mixture has a few of the rows only, and gains by more.
        saturating_tokens=0 if loaded.has_experts else kernels_of(device).saturating_tokens,
        eos_token_ids=loaded.eos_token_ids,
        default_sampling=loaded.default_sampling,
        num_ranks=loaded.ranks.size * loaded.ranks.stage.count,
        num_stages=loaded.ranks.stage.count,
    )
    log.info(
        "loaded %s: weights %s, KV cache %s in %s blocks of %s tokens, context %s tokens, %s",
        facts.model_type,
        format_size(facts.weight_bytes),
        format_size(facts.kv_cache_bytes) + (" of fp8" if cache.layout.dtype is FLOAT8 else ""),
        facts.num_blocks,
        facts.block_size,
        facts.max_model_len,
        facts.dtype,
    )
    return facts
