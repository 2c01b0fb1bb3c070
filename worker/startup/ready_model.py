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

from scheduler.cache_groups import CacheGroup
from worker.adapters.targets import Targets
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
from worker.devices.weight_life import refusing_out_of_memory
from worker.memory_sizes import CacheRequest, CacheSize, format_size, num_host_blocks, size_cache
from worker.model.layer_replacement import LayerReplacement, replace_layers
from worker.model.layer_shards import DividedLayout, divide_layout, refuse_division, share_of_node
from worker.model.quantization import rounding_of
from worker.model.quantized_layers import describe_codes, find_codes, skipping_products
from worker.model.rope import fix_rope, longest_right_len
from worker.model.temperature import fix_temperatures
from worker.model.toolkit import Toolkit
from worker.progress import LoadPhase, LoadStage
from worker.ranks.ranks import Ranks, is_divided
from worker.startup.kernel_choice import kernels_of
from worker.startup.loader import (
    NO_PAGED_ATTENTION,
    LoadedModel,
    describe_division,
)
from worker.startup.self_check import LONGEST_CHECK, Runner, SelfCheck, refusing
from worker.startup.start_adapters import targets_of, with_adapters
from worker.steps.host_pool import HostPool
from worker.steps.tokens import StepTokens
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
    replacement: LayerReplacement | None
    """The layers that our own kernels compute; None where torch computes all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A loaded model, and what it starts with."""

    config: WorkerConfig
    device: Device
    stage: LoadStage
    loaded: LoadedModel
    runner: Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
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
class _Sized:
    """The pools, and the longest sequence that they serve."""

    max_model_len: int
    cache: KVCache
    host_pool: HostPool


class _Proven(NamedTuple):
    """The backend that was tried, and the layers that kernels took over."""

    backend: AttentionBackend
    replacement: LayerReplacement | None


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
    start = _Start(config=config, device=device, stage=stage, loaded=loaded, runner=runner)
    measured = _measure(start, reserve)
    sized = _size(start, measured)
    proven = _prove(start, measured, sized)
    return ReadyModel(
        facts=_facts(start, measured, sized, proven.replacement),
        cache=sized.cache,
        host_pool=sized.host_pool,
        runner=runner,
        backend=proven.backend,
        toolkit=measured.toolkit,
        adapter_targets=measured.adapter_targets,
        replacement=proven.replacement,
    )


def _measure(start: _Start, reserve: Reserve) -> _Measured:
    """Find out what layers keep, open the kernels, and compute the largest step. Raises StartupError."""
    config, device, loaded = start.config, start.device, start.loaded
    checkpoint_len = longest_right_len(loaded.text_config, loaded.checkpoint_len, config.max_model_len)
    start.stage.enter(LoadPhase.MEASURING)
    whole_layout = _probe_layout(start)
    layouts = divide_layout(whole_layout, loaded.ranks, loaded.head_layers)
    toolkit = _open_toolkit(start)
    adapter_targets, reserve = _find_targets(start, reserve)
    budget_bytes = device.kv_cache_budget_bytes(_largest_step(start, checkpoint_len), reserve=reserve)
    return _Measured(
        whole_layout=whole_layout,
        layouts=layouts,
        toolkit=toolkit,
        adapter_targets=adapter_targets,
        checkpoint_len=checkpoint_len,
        budget_bytes=budget_bytes // config.num_ranks_on_device,
    )


def _prove(start: _Start, measured: _Measured, sized: _Sized) -> _Proven:
    """Try the model over the cache, put kernels under it, and try these. Raises StartupError."""
    loaded, device = start.loaded, start.device
    _correct(loaded, sized.max_model_len)
    start.stage.enter(LoadPhase.WARMING_UP)
    whole_cache = _small_cache(device, measured.whole_layout) if is_divided(loaded.ranks) else sized.cache
    check = SelfCheck(
        loaded=loaded,
        runner=start.runner,
        backend=RefAttention(whole_cache, device),
        cache=whole_cache,
        device=device,
        max_model_len=sized.max_model_len,
    )
    expected = check.run()
    stored_codes = find_codes(loaded.model)
    replacement, toolkit = None, measured.toolkit
    if toolkit is not None:
        check = replace(check, cache=sized.cache, backend=toolkit.attention_over(sized.cache))
        replacement = _put_kernels(
            start.config, toolkit, check, expected, start.stage, must_round_inputs=True
        )
    for line in describe_codes(stored_codes, find_codes(loaded.model)):
        log.info("%s", line)
    return _Proven(check.backend, replacement)


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


def _put_kernels(
    config: WorkerConfig,
    toolkit: Toolkit,
    check: SelfCheck,
    expected: Tensor,
    stage: LoadStage,
    *,
    must_round_inputs: bool,
) -> LayerReplacement:
    """Prove the products, replace layers, by the shards of this rank where there are several, and try them.

    Raises StartupError.
    """
    with toolkit.refusing_kernels(), refusing_out_of_memory(check.device, "kernels took over the weights"):
        toolkit.prove(check.loaded.model, must_round_inputs=must_round_inputs)
        replacement = _replace_layers(config, toolkit, check, stage)
        check.run_again(check.backend, expected, tolerance=rounding_of(config).tolerance)
    return replacement


def _replace_layers(
    config: WorkerConfig, toolkit: Toolkit, check: SelfCheck, stage: LoadStage
) -> LayerReplacement:
    loaded = check.loaded
    loaded.weights.offer()
    replacement = replace_layers(
        loaded.model,
        toolkit,
        check.device,
        max_model_len=check.max_model_len,
        ranks=loaded.ranks,
        free_taken=loaded.weights.free_taken,
    )
    log.info("%s", replacement.describe())
    _refuse_unquantized(config, replacement)
    if is_divided(loaded.ranks):
        _refuse_undivided(config, check, replacement)
    loaded.weights.settle(stage)
    stage.enter(LoadPhase.WARMING_UP)
    return replacement


def _open_toolkit(start: _Start) -> Toolkit | None:
    """Open the kernels, and the exchange of ranks, which needs them; without any, copy the weights.

    Raises StartupError.
    """
    config, device, stage, loaded = start.config, start.device, start.stage, start.loaded
    toolkit = kernels_of(device).open_toolkit(config, device, loaded.dtype, stage)
    if is_divided(loaded.ranks):
        if toolkit is None:
            raise StartupError(
                f"{describe_division(config)} needs the {device.kind} kernels, and there are none",
                fix=kernels_of(device).fix_of_ranks,
            )
        toolkit.divide_among(loaded.ranks)
        loaded.ranks.check_same("software and checkpoint", _describe_origin(config))
        loaded.ranks.check_same("devices", device.describe())
    elif toolkit is None:
        loaded.weights.settle(stage)
    else:
        return toolkit
    stage.enter(LoadPhase.MEASURING)
    return toolkit


def _describe_origin(config: WorkerConfig) -> str:
    """Name the versions and files that the shards of all ranks must come from."""
    words = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    if config.model_path:
        for file in find_weights(Path(config.model_path)):
            words.append(f"{file.path.name} {file.num_bytes}")
            if config.num_nodes == 1:  # else contents were compared when a node came: times differ there
                words.append(str(file.path.stat().st_mtime_ns))
    return ", ".join(words)


def _find_targets(start: _Start, reserve: Reserve) -> tuple[Targets, Reserve]:
    """Find what adapters can update, before any layer is replaced.

    Their memory is added to what is reserved, and that of weights that are yet to be copied.
    """
    config, loaded = start.config, start.loaded
    targets = targets_of(
        config,
        start.device,
        loaded.model,
        lambda num: _probe(start.runner, start.device, np.arange(num), num_logits=1),
    )
    reserve = reserve._replace(weight_bytes=loaded.weights.bytes_to_come // config.num_nodes)
    return targets, with_adapters(reserve, config, targets, loaded.dtype)


def _small_cache(device: Device, layout: BlockLayout) -> KVCache:
    """Make a cache of whole heads for the check of the model before it is divided."""
    num_blocks = -(-LONGEST_CHECK // layout.block_size)
    memory = device.zeros((num_blocks + 1) * layout.block_numel, layout.storage)
    return KVCache(layout, num_blocks, memory)


def _refuse_undivided(config: WorkerConfig, check: SelfCheck, replacement: LayerReplacement) -> None:
    """Raise StartupError if a layer with keys and values stayed whole."""
    ranks = check.loaded.ranks
    ranks.check_same("layers", f"{replacement.num_fused} of {replacement.num_layers} divided")
    has_whole_experts = replacement.experts.num_replaced < replacement.experts.num_found
    num_own = len(ranks.stage.layers_of(replacement.num_layers))
    is_whole = replacement.num_fused < replacement.num_layers or num_own < len(check.cache.layout.layers)
    if is_whole or has_whole_experts:
        raise refuse_division(describe_division(config), replacement.describe())


def _largest_step(start: _Start, checkpoint_len: int) -> Callable[[], None]:
    """Make a step of the most tokens, whose memory is measured."""
    num_tokens = start.config.max_num_batched_tokens
    positions = np.arange(num_tokens) % checkpoint_len

    def run() -> None:
        with refusing(start.loaded.model_type):
            num_logits = min(start.config.max_num_seqs, num_tokens)
            _probe(start.runner, start.device, positions, num_logits=num_logits)

    return run


def _refuse_unquantized(config: WorkerConfig, replacement: LayerReplacement) -> None:
    quantization = rounding_of(config).layers
    if quantization is not None and replacement.num_fused == replacement.num_kept_mlps:
        weights = "the MLPs of this model" if replacement.num_fused else "this model"
        raise StartupError(
            f"--quantization {quantization.word} has no effect on {weights} ({replacement.describe()})",
            fix="leave it out, or serve a model whose layers can be fused (docs/models.md)",
        )


def _probe(
    runner: Runner,
    device: Device,
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
    *,
    num_logits: int,
    token_ids: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None,
) -> ProbeAttention:
    """Run one sequence without a cache, of tokens 0 unless others are given."""
    num_tokens = len(positions)
    probe = ProbeAttention()
    wanted = np.arange(num_tokens - num_logits, num_tokens)
    ids = np.zeros(num_tokens, np.int64) if token_ids is None else token_ids
    runner.forward(StepTokens.of(device, ids, positions, wanted), probe)
    return probe


def probe_shapes(device: Device, loaded: LoadedModel, runner: Runner) -> dict[int, LayerShape]:
    """Read each layer's shape from one call. Raises StartupError if the model calls another attention."""
    with refusing(loaded.model_type), skipping_products():
        probe = _probe(runner, device, np.arange(2), num_logits=1)
    if not probe.shapes:
        raise FamilyRefused(f"{loaded.model_type} {NO_PAGED_ATTENTION}")
    return dict(sorted(probe.shapes.items()))


def _probe_layout(start: _Start) -> BlockLayout:
    config, device, loaded = start.config, start.device, start.loaded
    dtype = cache_dtype(config.kv_cache_dtype, loaded.dtype)
    return BlockLayout(
        layers=with_layers_beside(probe_shapes(device, loaded, start.runner), loaded.layers_beside),
        block_size=config.block_size or device.default_block_size,
        dtype=dtype,
        scales=_measure_scales(start) if dtype is FLOAT8 else {},
    )


def _measure_scales(start: _Start) -> dict[int, tuple[float, float]]:
    """Find the scales of each layer's keys and values from a sequence of random tokens."""
    loaded = start.loaded
    length = min(_MEASURED_TOKENS, loaded.checkpoint_len)
    ids = np.random.default_rng(_SEED).integers(0, loaded.vocab_size, length)
    with refusing(loaded.model_type):
        probe = _probe(start.runner, start.device, np.arange(length), num_logits=1, token_ids=ids)
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


def _size(start: _Start, measured: _Measured) -> _Sized:
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
    return _Sized(max_model_len=size.max_model_len, cache=cache, host_pool=host_pool)


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
        most_read_tokens=layout.most_read_tokens(config.max_num_batched_tokens),
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


def _facts(
    start: _Start, measured: _Measured, sized: _Sized, replacement: LayerReplacement | None
) -> ModelFacts:
    device, loaded, cache = start.device, start.loaded, sized.cache
    facts = loaded.facts(
        device,
        kernels=replacement.kernels if replacement is not None and replacement.num_fused else "",
        max_model_len=sized.max_model_len,
        block_size=cache.layout.block_size,
        num_blocks=cache.num_blocks,
        kv_cache_bytes=cache.num_bytes,
        groups=(CacheGroup(measured.whole_layout.lifetime),),
        num_host_blocks=sized.host_pool.num_blocks,
        copy_s_per_block=sized.host_pool.measure_copy_s(),
        # Each expert of a mixture has a few of the rows only, and gains by more.
        saturating_tokens=0 if loaded.has_experts else kernels_of(device).saturating_tokens,
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
