"""One family served by the worker from memory, and what came of it.

Owns: building a family tiny (from transformers' own configuration class, with random weights), the steps
that two sequences are computed in, and the comparison with the model's own forward over each sequence alone.
Never: a checkpoint on disk, or what is expected of a family (docs/models.md has that).

Shapes: T tokens, V tokens of the vocabulary.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from scheduler.cache_groups import CacheGroup, LifetimeKind
from scheduler.messages import (
    BlockId,
    NewSequence,
    NewTable,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
)
from tests.checkpoints import vary_constants
from tests.families import ALTERNATING, OTHER_PARTS, TINY, Family
from tests.worker.family_traits import find_traits
from worker.attention.indexers import keep_index_keys
from worker.attention.interface import ATTENTION_NAME
from worker.attention.latents import keep_latents
from worker.checkpoint.task_choice import generating_class
from worker.devices.device import Device, open_device
from worker.devices.weight_life import WeightLife
from worker.load.loader import LoadedModel
from worker.load.model_kind import NO_PAGED_ATTENTION, refuse_layers
from worker.load.model_sizes import longest_len
from worker.load.recurrent_functions import knows_recurrence, replace_functions
from worker.model.layer_replacement import LayerReplacement
from worker.own_cache.model import OwnCacheModel
from worker.own_cache.start import try_caches
from worker.progress import LoadStage
from worker.startup.ready_model import ReadyModel, start_loaded
from worker.steps.inputs import build_inputs
from worker.steps.model_runner import ModelRunner
from worker.steps.row_table import RowTable
from worker.steps.tokens import StepTokens
from worker.worker_config import WorkerConfig
from worker.worker_errors import FamilyRefused

FIRST, SECOND = SequenceId(0), SequenceId(1)
# Longer than the families' windows of 12 tokens, and than their chunks of 8.
LENGTHS = {FIRST: 24, SECOND: 19}
# Alone; beside a later chunk; a decode beside a chunk; decodes.
STEPS = ({FIRST: 9}, {FIRST: 11, SECOND: 6}, {SECOND: 10, FIRST: 1}, *({FIRST: 1, SECOND: 1},) * 3)
CONFIG = WorkerConfig(
    model_path="",
    dtype="float32",
    device="cpu",
    num_threads=1,
    block_size=4,
    num_blocks=600,
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=32,
)
_SEED = 20260101
# Large enough that a wrong mask, norm or rotation moves logits by more than rounding could.
_WEIGHT_SCALE = 0.2


class UnknownFamily(Exception):
    """The installed transformers does not have it."""


@dataclass(kw_only=True)
class Found:
    """Result of one family."""

    family: Family
    refused: str | None = None
    """Reason for not being served, or not through the paged cache; None if it is."""
    way: str | None = None
    """Computation with caches of its own, if it is refused otherwise."""
    traits: tuple[str, ...] = ()
    """Demands of the tiny model on attention and on its layers."""
    error: float = 0.0
    """The largest error of a logit over the size of the largest logit."""
    replacement: LayerReplacement | None = None
    """Report of the kernels; None: there were none."""


def try_family(family: Family) -> Found:
    """Build, serve, compare. Raises UnknownFamily."""
    config = tiny_config(family)
    device = open_device(CONFIG)
    try:
        if not knows_recurrence(config):
            refuse_layers(config.get_text_config(decoder=True))
        model = _build(config)
        keep_index_keys(model)
        reference = copy.deepcopy(model)
        ready = _start(model, device)
    except FamilyRefused as refused:
        return _try_own_cache(Found(family=family, refused=refused.what), config)
    traits = find_traits(reference)
    reference.set_attn_implementation("eager")
    generator = np.random.default_rng(_SEED)
    token_ids = {
        each: generator.integers(3, ready.facts.vocab_size, length) for each, length in LENGTHS.items()
    }
    ours = _serve(ready, device, token_ids)
    found = Found(family=family, replacement=ready.proven.replacement, traits=traits)
    for each, ids in token_ids.items():
        with torch.inference_mode():
            expected_TV = reference(input_ids=torch.from_numpy(ids[None]), use_cache=False).logits[0]
        expected_TV = expected_TV[:, : ours[each].shape[1]]
        error = (ours[each] - expected_TV).abs().max() / expected_TV.abs().max()
        found.error = max(found.error, float(error.nan_to_num(torch.inf)))
    return found


def _try_own_cache(found: Found, config: Any) -> Found:
    """Whether it is served all the same."""
    assert found.refused is not None
    try:
        model = _build(config, attention=None)
        loaded = _loaded(model, CONFIG.max_model_len or 0, open_device(CONFIG))
        trial = try_caches(OwnCacheModel(model, TINY["vocab_size"]), loaded, found.refused)
    except FamilyRefused:
        return found
    found.way, found.error = trial.describe(), trial.error
    return found


def tiny_config(family: Family) -> Any:
    """Raises UnknownFamily."""
    try:
        of_family = CONFIG_MAPPING[family.model_type]
    except KeyError as unknown:
        raise UnknownFamily(f"the installed transformers does not know {family.model_type}") from unknown
    if family.text_part:
        text_config = tiny_config(Family(model_type=family.text_part, settings=family.settings)).to_dict()
        others = {key: value for key, value in OTHER_PARTS.items() if hasattr(of_family(), key)}
        return of_family(text_config=text_config, **others)
    defaults = of_family().to_dict()
    known = {*defaults, *of_family.attribute_map}
    settings = {key: value for key, value in TINY.items() if key in known}
    if "layer_types" in known:
        # A list made for the default number of layers would not fit.
        attends = set() < {*(defaults.get("layer_types") or ())} <= {*ALTERNATING}
        settings["layer_types"] = ALTERNATING if attends else None
    settings |= family.settings
    return of_family(**{key: value for key, value in settings.items() if value is not None})


def _build(config: Any, attention: str | None = ATTENTION_NAME) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        try:
            model = generating_class(config).from_config(
                config, dtype=torch.float32, attn_implementation=attention
            )
        except KeyError as error:
            if ATTENTION_NAME in error.args:
                raise FamilyRefused(f"{config.model_type} {NO_PAGED_ATTENTION}") from error
            raise
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, _WEIGHT_SCALE)
        vary_constants(model, torch)
    replace_functions(model)
    return model.eval()


def _start(model: Any, device: Device) -> ReadyModel[ModelRunner]:
    keep_latents(model)
    text_config = model.config.get_text_config(decoder=True)
    loaded = _loaded(model, longest_len(text_config, CONFIG.max_model_len), device)
    return start_loaded(CONFIG, device, LoadStage(), loaded, ModelRunner(model, loaded.vocab_size))


def _loaded(model: Any, checkpoint_len: int, device: Device) -> LoadedModel:
    return LoadedModel(
        model=model,
        dtype=model.dtype,
        model_type=model.config.model_type,
        text_config=model.config.get_text_config(decoder=True),
        num_parameters=0,
        weight_bytes=0,
        vocab_size=TINY["vocab_size"],
        checkpoint_len=checkpoint_len,
        eos_token_ids=(),
        default_sampling={},
        weights=WeightLife(model, device),
    )


def tables_of(
    groups: tuple[CacheGroup, ...], num_places: int, blocks: Iterator[BlockId]
) -> tuple[NewTable, ...]:
    """Make tables for as many places, of blocks in that order."""
    counts = [1 if group.lifetime.kind is LifetimeKind.FIXED else num_places for group in groups]
    return tuple(
        NewTable(tuple(islice(blocks, num * group.num_stripes)))
        for num, group in zip(counts, groups, strict=True)
    )


def _serve(
    ready: ReadyModel[ModelRunner], device: Device, token_ids: dict[SequenceId, Any]
) -> dict[SequenceId, Tensor]:
    """Compute both sequences in STEPS; returns the logits [T, V] of all tokens of each."""
    facts = ready.facts
    rows = RowTable(
        max_num_seqs=CONFIG.max_num_seqs,
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        groups=facts.groups,
    )
    num_places = -(-max(LENGTHS.values()) // facts.block_size)
    for each, ids in token_ids.items():
        rows.add(
            NewSequence(
                sequence_id=each,
                token_ids=tuple(ids.tolist()),
                num_prompt_tokens=len(ids),
                params=SamplingParams(),
                # One has the even blocks and the other the odd ones.
                tables=tables_of(facts.groups, num_places, map(BlockId, count(1 + each, 2))),
            )
        )
    num_computed = dict.fromkeys(token_ids, 0)
    logits: dict[SequenceId, list[Tensor]] = {each: [] for each in token_ids}
    for step in STEPS:
        shares = tuple(
            ScheduledSequence(each, num_computed[each], count, samples=False) for each, count in step.items()
        )
        for each, rows_TV in _compute(ready, device, rows, shares).items():
            logits[each].append(rows_TV)
            num_computed[each] += len(rows_TV)
    return {each: torch.cat(parts) for each, parts in logits.items()}


def _compute(
    ready: ReadyModel[ModelRunner], device: Device, rows: RowTable, shares: tuple[ScheduledSequence, ...]
) -> dict[SequenceId, Tensor]:
    num_tokens = sum(share.num_tokens for share in shares)
    plan = SchedulerOutput(
        step=0,
        released=(),
        new_sequences=(),
        new_blocks={},
        scheduled=shares,
        num_scheduled_tokens=num_tokens,
    )
    failures: dict[SequenceId, str] = {}
    inputs = build_inputs(plan, rows, failures)
    assert inputs is not None
    assert not failures
    ready.proven.backend.begin_step(inputs.metadata)
    tokens = StepTokens.of(device, inputs.input_ids_T, inputs.position_ids_T, np.arange(num_tokens))
    logits_TV = ready.runner.forward(tokens, ready.proven.backend).logits_NV
    parts = logits_TV.split([share.num_tokens for share in inputs.shares])
    return {share.sequence_id: part for share, part in zip(inputs.shares, parts, strict=True)}
