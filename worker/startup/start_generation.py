"""Start of a model that generates.

Owns: the load before ready_model.py, and the rows, runner and sampler after it.
Never: runs a plan.
"""

from dataclasses import replace

from worker.adapters.store import AdapterStore
from worker.adapters.targets import in_torch
from worker.checkpoint.checkpoint_files import find_checkpoint
from worker.devices.device import Device
from worker.progress import LoadStage
from worker.ranks.ranks import ALONE, Ranks, samples
from worker.sampling.grammar_rows import Grammars
from worker.sampling.rank_samplers import FollowingSampler
from worker.sampling.row_sampler import RowSampler
from worker.sampling.sampler import Sampler
from worker.speculation.drafter import Drafter
from worker.startup.kernel_choice import kernels_of
from worker.startup.loader import LoadedModel, ModelKind, load_model
from worker.startup.ready_model import ReadyModel, start_loaded
from worker.startup.start_adapters import open_adapters
from worker.startup.start_drafting import load_draft, naming_draft, open_draft, verifies_drafts
from worker.steps.generation_step import GenerationSteps
from worker.steps.model_runner import EagerSteps, ModelRunner, StageRunner, StepRunner
from worker.steps.row_table import RowTable
from worker.worker_config import AdapterFacts, ModelFacts, WorkerConfig


def start_generating(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage, ranks: Ranks
) -> tuple[ModelFacts, GenerationSteps]:
    """Load, measure, allocate, try. Raises StartupError, with a fix, for a model that cannot be served."""
    has_drafts = verifies_drafts(config, device)
    loaded = load_model(config, kind, device, stage, ranks)
    draft = load_draft(config, kind, loaded, device)
    if draft is not None:
        loaded = replace(loaded, layers_beside=draft.shapes)
    ready = start_generator(config, loaded, device, stage)
    adapters, adapter_facts = _open_adapters(config, loaded, ready, device)
    facts = replace(ready.facts, adapters=adapter_facts)
    grammars = _open_grammars(config, facts)
    rows = RowTable.of(facts, config.max_num_seqs)
    steps: StepRunner
    sampler: RowSampler
    if ready.toolkit is not None and ready.toolkit.runs_ahead:
        from worker.startup.start_gpu_steps import open_steps  # only here: Triton is not on every machine

        steps, sampler = open_steps(config, ready, device, stage, grammars, ranks)
        facts = replace(facts, runs_ahead=True)
    else:
        steps = EagerSteps(ready.runner, ready.backend, device)
        sampler = _open_sampler(config, facts.vocab_size, device, grammars, ranks)
    if has_drafts:
        max_drafts = config.speculation.num_speculative_tokens
        facts = replace(facts, max_drafts=max_drafts, has_draft_model=draft is not None)
    generation = GenerationSteps(
        device=device,
        # To ranks that do not sample, the tokens of a step come with a later plan.
        facts=facts if samples(ranks) else replace(facts, runs_ahead=True),
        rows=rows,
        host_pool=ready.host_pool,
        steps=steps,
        sampler=sampler,
    )
    if adapters is not None:
        generation.adapt(adapters)
    if facts.max_drafts and ranks.rank == 0:  # the others verify what its plans bring
        generation.speculate(Drafter(config.speculation))
    if draft is not None:
        with naming_draft(config):
            generation.speculate_with(open_draft(draft, ready, device, rows, sampler))
    return facts, generation


def _open_grammars(config: WorkerConfig, facts: ModelFacts) -> Grammars:
    grammars = Grammars(
        find_checkpoint(config.model_path), vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids
    )
    grammars.open_ahead()
    return grammars


def _open_adapters(
    config: WorkerConfig, loaded: LoadedModel, ready: ReadyModel[ModelRunner], device: Device
) -> tuple[AdapterStore | None, tuple[AdapterFacts, ...]]:
    if not kernels_of(device).stacks_adapters or not config.adapter_limits.max_in_step:
        cache_bytes = ready.facts.kv_cache_bytes
        return open_adapters(config, loaded, ready.adapter_targets, in_torch(), cache_bytes=cache_bytes)
    from worker.startup.start_gpu_steps import adapters_by_triton  # only here, as above

    way = adapters_by_triton(config, ready.runner, device, dtype=loaded.dtype)
    return open_adapters(config, loaded, ready.adapter_targets, way, cache_bytes=None)


def _open_sampler(
    config: WorkerConfig, vocab_size: int, device: Device, grammars: Grammars, ranks: Ranks
) -> RowSampler:
    if samples(ranks):
        return Sampler(vocab_size=vocab_size, device=device, grammars=grammars, ranks=ranks)
    return FollowingSampler(
        vocab_size=vocab_size,
        max_num_seqs=config.max_num_seqs,
        device=device,
        ranks=ranks,
        drawn_by=Sampler(vocab_size=vocab_size, device=device),
    )


def load_generator(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage, ranks: Ranks = ALONE
) -> ReadyModel[ModelRunner]:
    """Load the model with its cache, without a sampler. Raises StartupError."""
    return start_generator(config, load_model(config, kind, device, stage, ranks), device, stage)


def start_generator(
    config: WorkerConfig, loaded: LoadedModel, device: Device, stage: LoadStage
) -> ReadyModel[ModelRunner]:
    """Give a loaded model its cache and kernels. Raises StartupError."""
    runner = (ModelRunner if loaded.ranks.stage.is_last else StageRunner)(loaded.model, loaded.vocab_size)
    reserved = kernels_of(device).reserve(config, loaded)
    return start_loaded(config, device, stage, loaded, runner, reserve=reserved)
