"""The way from loaded weights to a model that is ready to run steps.

Owns: the order of the start. One call of the model shows the keys and values that each layer keeps, which
gives the layout of the cache; the memory that is left gives its size; the size gives the longest sequence.
At the end the whole is tried (proving.py), and copies between the pools are timed.
"""

import logging
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from worker.attention.kv_cache import FLOAT8, NOTHING_KEPT
from worker.devices.device import NO_RESERVE, Device, Reserve
from worker.load.draft_kind import note_left_out
from worker.load.loader import LoadedModel
from worker.memory_sizes import format_size
from worker.progress import LoadStage
from worker.startup.cache_memory import Measured, OpenPools, measure, open_pools
from worker.startup.kernel_choice import kernels_of
from worker.startup.probing import Start
from worker.startup.proving import Proven, prove
from worker.startup.self_check import Runner
from worker.steps.model_runner import EagerSteps, ModelRunner, StageRunner, StepRunner
from worker.worker_config import DraftMethod, ModelFacts, WorkerConfig
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

AnyRunner = TypeVar("AnyRunner", bound=Runner)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel(Generic[AnyRunner]):
    """A model that was measured, has its pools, and was tried."""

    facts: ModelFacts
    runner: AnyRunner
    measured: Measured
    pools: OpenPools
    proven: Proven
    has_room_beside: bool
    """Whether the pools have the layers of the draft model that the load brought."""


def open_eager_steps(ready: ReadyModel[ModelRunner], device: Device) -> StepRunner:
    """Make the runner of steps that call the model for each."""
    return EagerSteps(ready.runner, ready.proven.backend, device)


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
    start = Start(config=config, device=device, stage=stage, loaded=loaded, runner=runner)
    start, measured, pools = _with_pools(start, reserve)
    proven = prove(start, measured.whole_layout, measured.toolkit, pools.cache, pools.max_model_len)
    facts = _facts(start, measured, pools, proven)
    return ReadyModel(
        facts=facts,
        runner=runner,
        measured=measured,
        pools=pools,
        proven=proven,
        has_room_beside=start.loaded.beside is loaded.beside,
    )


def _with_pools(start: Start, reserve: Reserve) -> tuple[Start, Measured, OpenPools]:
    """Measure and allocate; a head that was not asked for is left out if it is in the way of that."""
    try:
        measured = measure(start, reserve)
        return start, measured, open_pools(start, measured)
    except StartupError as error:
        is_asked = start.config.speculation.method is not DraftMethod.AUTO
        if is_asked or start.loaded.beside is NOTHING_KEPT:
            raise
        note_left_out(error.what)
    return _with_pools(replace(start, loaded=replace(start.loaded, beside=NOTHING_KEPT)), reserve)


def _facts(start: Start, measured: Measured, pools: OpenPools, proven: Proven) -> ModelFacts:
    replacement = proven.replacement
    device, loaded, cache = start.device, start.loaded, pools.cache
    facts = loaded.facts(
        device,
        kernels=replacement.kernels if replacement is not None and replacement.num_fused else "",
        max_model_len=pools.max_model_len,
        block_size=cache.layout.block_size,
        num_blocks=cache.num_blocks,
        kv_cache_bytes=cache.num_bytes,
        groups=measured.layouts.all_stages.groups,
        num_host_blocks=pools.host_pool.num_blocks,
        copy_s_per_block=pools.host_pool.measure_copy_s(),
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


def start_generator(
    config: WorkerConfig, loaded: LoadedModel, device: Device, stage: LoadStage
) -> ReadyModel[ModelRunner]:
    """Give a loaded model its cache and kernels. Raises StartupError."""
    runner = (ModelRunner if loaded.ranks.stage.is_last else StageRunner)(loaded.model, loaded.vocab_size)
    reserved = kernels_of(device).reserve(config, loaded)
    return start_loaded(config, device, stage, loaded, runner, reserve=reserved)
