"""Start of a model that pools prompts to vectors or scores.

Owns: the pooling of the model, the longest prompt, and the nominal KV cache of an encoder, which has none.
Never: runs a plan.
"""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from scheduler.messages import PoolingTask, PromptComputation
from worker.checkpoint.pooling_files import PoolingMode, read_recipe, score_activation
from worker.checkpoint.task import Task
from worker.devices.device import Device
from worker.model.body import whole_body_of
from worker.model.quantization import refuse_quantization
from worker.pooling.decoder_pooling import BodyRunner, DecoderPrompts
from worker.pooling.encoder_pooling import (
    EncoderModel,
    EncoderPrompts,
    Prompt,
    check_padding,
    read_hidden_states,
    read_logits,
)
from worker.pooling.pooler import LastTokenScores, Pooler, Readout, Scores
from worker.pooling.step import PoolingSteps, PromptRunner, PromptTable
from worker.progress import LoadPhase, LoadStage
from worker.startup.loader import LoadedModel, ModelKind, load_model
from worker.startup.ready_model import start_loaded
from worker.startup.self_check import refusing
from worker.steps.row_table import RowTable
from worker.worker_config import ModelFacts, PoolingFacts, WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError

log = logging.getLogger(__name__)

_TASKS = {Task.EMBED: PoolingTask.EMBED, Task.SCORE: PoolingTask.SCORE}


def start_pooling(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage
) -> tuple[ModelFacts, PoolingSteps]:
    """Load and try. Raises StartupError, with a fix, for a model that cannot be served."""
    if kind.is_encoder:
        _refuse_useless_options(config)
    loaded = load_model(config, kind, device, stage)
    if kind.is_encoder:
        facts, runner = _start_encoder(config, kind, device, stage, loaded)
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
            raise _no_single_score(loaded)
        readout = LastTokenScores(score_activation(kind.checkpoint_config), head)
        own_body: Any = loaded.model.base_model
    else:
        recipe = read_recipe(kind.folder, default=PoolingMode.LAST)
        loaded = _shortened(loaded, recipe.max_len)
        readout = Pooler(recipe, loaded.text_config.hidden_size, device.torch_device)
        own_body = loaded.model
        if recipe.mode is not PoolingMode.LAST:
            # In chunks, a partial result would have to be kept, and swapped, with the blocks.
            prompt = PromptComputation.AT_ONCE
            loaded = _fitted_into_a_step(loaded, config)

    def find_body() -> Any:
        return whole_body_of(loaded.model) or own_body

    ready = start_loaded(config, device, stage, loaded, BodyRunner(find_body))
    pooling = PoolingFacts(task=_TASKS[kind.task], num_dimensions=readout.num_dimensions, prompt=prompt)
    prompts = DecoderPrompts(ready.runner, ready.backend, ready.host_pool, readout, device)
    return replace(ready.facts, pooling=pooling), prompts


def _start_encoder(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage, loaded: LoadedModel
) -> tuple[ModelFacts, PromptRunner]:
    model_config: Any = loaded.model.config
    model_config.use_cache = False
    loaded = _shortened(loaded, _num_positions(loaded.model))
    readout: Pooler | Scores
    if kind.task is Task.SCORE:
        if model_config.num_labels != 1:
            raise _no_single_score(loaded)
        readout = Scores(score_activation(kind.checkpoint_config))
        encoder = EncoderModel(loaded.model, device, read_logits(readout))
    else:
        recipe = read_recipe(kind.folder, default=PoolingMode.MEAN)
        loaded = _shortened(loaded, recipe.max_len)
        readout = Pooler(recipe, loaded.text_config.hidden_size, device.torch_device)
        encoder = EncoderModel(loaded.model, device, read_hidden_states(readout))
    max_model_len = _encoder_len(_fitted_into_a_step(loaded, config), config)
    _try_encoder(encoder, config, device, stage, replace(loaded, checkpoint_len=max_model_len))
    pooling = PoolingFacts(
        task=_TASKS[kind.task], num_dimensions=readout.num_dimensions, prompt=PromptComputation.AT_ONCE
    )
    facts = _encoder_facts(config, device, loaded, max_model_len)
    return replace(facts, pooling=pooling), EncoderPrompts(encoder, readout.cut)


def _try_encoder(
    encoder: EncoderModel, config: WorkerConfig, device: Device, stage: LoadStage, loaded: LoadedModel
) -> None:
    """Raise StartupError if the longest prompt, padding, or on a GPU the largest step, fails."""
    longest = Prompt(np.zeros(loaded.checkpoint_len, dtype=np.int32))

    def run_largest_step() -> None:
        encoder.run([longest] * max(1, config.max_num_batched_tokens // loaded.checkpoint_len))

    with refusing(loaded.model_type):
        stage.enter(LoadPhase.MEASURING)
        device.kv_cache_budget_bytes(run_largest_step)  # to see that it fits: there is no cache to size
        stage.enter(LoadPhase.WARMING_UP)
        encoder.run([longest])
        check_padding(encoder, loaded.dtype, vocab_size=loaded.vocab_size, max_len=loaded.checkpoint_len)


def _encoder_facts(
    config: WorkerConfig, device: Device, loaded: LoadedModel, max_model_len: int
) -> ModelFacts:
    """Build the facts of a model that fills none of the blocks that the scheduler counts.

    The blocks hold twice the sequences that may run at once: a watermark may keep half of them free.
    """
    block_size = config.block_size or device.default_block_size
    blocks_of_longest = -(-max_model_len // block_size)
    return loaded.facts(
        device,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=config.num_blocks or 2 * config.max_num_seqs * blocks_of_longest,
        kv_cache_bytes=0,
    )


def _refuse_useless_options(config: WorkerConfig) -> None:
    for flag, value in (
        ("--kv-cache-memory", config.kv_cache_bytes),
        ("--swap-space", config.swap_space_bytes),
    ):
        if value:
            raise StartupError(f"{flag}: an encoder has no KV cache", fix="leave it out")
    refuse_quantization(config, ": the layers of encoders are not quantized")


def _shortened(loaded: LoadedModel, length: int | None) -> LoadedModel:
    """Cut the context window to `length` tokens."""
    return loaded if length is None else replace(loaded, checkpoint_len=min(loaded.checkpoint_len, length))


def _fitted_into_a_step(loaded: LoadedModel, config: WorkerConfig) -> LoadedModel:
    """Cut the context window to the prompts that one step can hold."""
    asked, step = config.max_model_len, config.max_num_batched_tokens
    if asked is not None and step < asked <= loaded.checkpoint_len:
        raise StartupError(
            f"max_model_len {asked}: prompts of this model are computed in one step, of {step} tokens",
            fix=f"give --max-num-batched-tokens {asked} too, or ask for --max-model-len {step}",
        )
    return _shortened(loaded, step)


def _encoder_len(loaded: LoadedModel, config: WorkerConfig) -> int:
    asked = config.max_model_len
    if asked is not None and asked > loaded.checkpoint_len:
        raise StartupError(
            f"max_model_len {asked} exceeds the model's own context window of {loaded.checkpoint_len} tokens",
            fix=f"ask for --max-model-len {loaded.checkpoint_len} or less",
        )
    return asked or loaded.checkpoint_len


def _num_positions(model: nn.Module) -> int | None:
    """Count the positions of a learned table that a prompt can use: RoBERTa's begins behind its padding."""
    table: Any
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    return None


def _no_single_score(loaded: LoadedModel) -> StartupError:
    model_config: Any = loaded.model.config
    return FamilyRefused(
        f"this {loaded.model_type} checkpoint has {model_config.num_labels} outputs, not one score"
    )
