"""Start of a model that generates."""

from dataclasses import replace

from worker.devices.device import Device
from worker.load.loader import load_model
from worker.load.model_kind import ModelKind
from worker.progress import LoadStage
from worker.ranks.ranks import Ranks, samples
from worker.sampling.open_sampler import open_grammars, open_sampler
from worker.startup.kernel_choice import verifies_drafts
from worker.startup.ready_model import open_eager_steps, start_generator
from worker.startup.start_adapters import open_generator_adapters
from worker.startup.start_drafting import load_draft, open_draft
from worker.steps.generation_step import GenerationSteps
from worker.steps.head_steps import HeadSteps
from worker.steps.pictures import Pictures, open_pictures
from worker.steps.row_table import RowTable
from worker.worker_config import ModelFacts, WorkerConfig


def start_generating(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage, ranks: Ranks
) -> tuple[ModelFacts, GenerationSteps]:
    """Load, measure, allocate, try. Raises StartupError, with a fix, for a model that cannot be served."""
    has_drafts = verifies_drafts(config, device)
    loaded = load_model(config, kind, device, stage, ranks)
    draft = load_draft(config, kind, loaded, device)
    if draft is not None:
        loaded = replace(loaded, beside=draft.kept)
    ready = start_generator(config, loaded, device, stage)
    if not ready.has_room_beside:
        draft = None
    adapters, adapter_facts = open_generator_adapters(
        config, loaded, ready.measured.adapter_targets, ready.runner, device, ready.facts.kv_cache_bytes
    )
    facts = replace(ready.facts, adapters=adapter_facts)
    grammars = open_grammars(config, facts)
    rows = RowTable.of(facts, config.max_num_seqs)
    toolkit = ready.measured.toolkit
    facts = replace(facts, runs_ahead=toolkit is not None and toolkit.runs_ahead)
    facts, pictures = open_pictures(facts, ready.runner, device, ranks)
    opened = None if draft is None else open_draft(config, draft, ready, rows)  # before steps are captured
    if facts.runs_ahead:
        from worker.startup.start_gpu_steps import open_steps  # only here: Triton is not on every machine

        steps, sampler = open_steps(config, ready, device, stage, grammars, ranks)
    else:
        steps = open_eager_steps(ready, device)
        sampler = open_sampler(config, facts, device, grammars, ranks)
    if has_drafts:
        max_drafts = config.speculation.num_speculative_tokens
        facts = replace(facts, max_drafts=max_drafts, has_draft_model=opened is not None)
    generation = GenerationSteps(
        device=device,
        # To ranks that do not sample, the tokens of a step come with a later plan.
        facts=facts if samples(ranks) else replace(facts, runs_ahead=True),
        rows=rows,
        host_pool=ready.pools.host_pool,
        steps=steps,
        sampler=sampler,
    )
    if adapters is not None:
        generation.adapt(adapters)
    if pictures is not None:
        _open_eyes(pictures, generation, opened and opened[0])
    if facts.max_drafts and ranks.rank == 0:  # the others verify what its plans bring
        generation.speculate(config.speculation)
    if opened is not None:
        generation.speculate_with(*opened)
    return facts, generation


def _open_eyes(pictures: Pictures, generation: GenerationSteps, draft_steps: object) -> None:
    generation.see(pictures)
    if isinstance(draft_steps, HeadSteps):
        draft_steps.see(pictures)
