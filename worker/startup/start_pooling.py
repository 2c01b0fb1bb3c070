"""Start of a model that pools prompts to vectors or scores."""

import logging
from dataclasses import replace
from typing import Any

from torch import nn

from scheduler.messages import PromptComputation
from worker.checkpoint.pooling_files import PoolingMode, read_recipe, score_activation
from worker.checkpoint.task import Task
from worker.devices.device import Device
from worker.load.loader import LoadedModel, load_model
from worker.load.model_kind import ModelKind
from worker.pooling.decoder_pooling import DecoderPrompts
from worker.pooling.pooler import LastTokenScores, Pooler, Readout
from worker.pooling.step import PoolingSteps, PromptRunner, PromptTable
from worker.progress import LoadStage
from worker.startup.ready_model import start_loaded
from worker.startup.start_encoder import (
    POOLING_TASKS,
    fitted_into_a_step,
    no_single_score,
    refuse_useless_options,
    shortened,
    start_encoder,
)
from worker.steps.model_runner import BodyRunner
from worker.steps.row_table import RowTable
from worker.worker_config import ModelFacts, PoolingFacts, WorkerConfig

log = logging.getLogger(__name__)


def start_pooling(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage
) -> tuple[ModelFacts, PoolingSteps]:
    """Load and try. Raises StartupError, with a fix, for a model that cannot be served."""
    if kind.is_encoder:
        refuse_useless_options(config)
    loaded = load_model(config, kind, device, stage)
    if kind.is_encoder:
        facts, runner = start_encoder(config, kind, device, stage, loaded)
    else:
        facts, runner = _start_decoder(config, kind, device, stage, loaded)
    log.info("pools: %s", facts.pooling)
    rows = RowTable.of(facts, config.max_num_seqs)
    return facts, PoolingSteps(PromptTable(facts, rows, runner), runner)


def _start_decoder(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage, loaded: LoadedModel
) -> tuple[ModelFacts, PromptRunner]:
    readout: Readout
    prompt = PromptComputation.REUSING
    if kind.task is Task.SCORE:
        head = getattr(loaded.model, "score", None)
        if not isinstance(head, nn.Linear) or head.out_features != 1:
            raise no_single_score(loaded)
        readout = LastTokenScores(score_activation(kind.checkpoint_config), head)
        own_body: Any = loaded.model.base_model
    else:
        recipe = read_recipe(kind.folder, default=PoolingMode.LAST)
        loaded = shortened(loaded, recipe.max_len)
        readout = Pooler(recipe, loaded.text_config.hidden_size, device.torch_device)
        own_body = loaded.model
        if recipe.mode is not PoolingMode.LAST:
            # In chunks, a partial result would have to be kept, and swapped, with the blocks.
            prompt = PromptComputation.AT_ONCE
            loaded = fitted_into_a_step(loaded, config)

    ready = start_loaded(config, device, stage, loaded, BodyRunner(loaded.model, own_body))
    pooling = PoolingFacts(
        task=POOLING_TASKS[kind.task], num_dimensions=readout.num_dimensions, prompt=prompt
    )
    prompts = DecoderPrompts(ready.runner, ready.proven.backend, ready.pools.host_pool, readout, device)
    return replace(ready.facts, pooling=pooling), prompts
