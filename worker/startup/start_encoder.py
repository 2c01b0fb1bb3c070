"""Start of an encoder, which pools prompts and keeps nothing of them."""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from scheduler.messages import PoolingTask, PromptComputation
from worker.checkpoint.pooling_files import PoolingMode, read_recipe, score_activation
from worker.checkpoint.task import Task
from worker.devices.device import Device
from worker.load.loader import LoadedModel
from worker.load.model_kind import ModelKind
from worker.model.quantization import refuse_quantization
from worker.pooling.encoder_pooling import (
    EncoderModel,
    EncoderPrompts,
    Prompt,
    check_padding,
    read_hidden_states,
    read_logits,
)
from worker.pooling.pooler import Pooler, Scores
from worker.pooling.step import PromptRunner
from worker.progress import LoadPhase, LoadStage
from worker.startup.self_check import refusing
from worker.worker_config import ModelFacts, PoolingFacts, WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError

POOLING_TASKS = {Task.EMBED: PoolingTask.EMBED, Task.SCORE: PoolingTask.SCORE}


def start_encoder(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage, loaded: LoadedModel
) -> tuple[ModelFacts, PromptRunner]:
    """Make an encoder ready. Raises StartupError."""
    model_config: Any = loaded.model.config
    model_config.use_cache = False
    loaded = shortened(loaded, _num_positions(loaded.model))
    readout: Pooler | Scores
    if kind.task is Task.SCORE:
        if model_config.num_labels != 1:
            raise no_single_score(loaded)
        readout = Scores(score_activation(kind.checkpoint_config))
        encoder = EncoderModel(loaded.model, device, read_logits(readout))
    else:
        recipe = read_recipe(kind.folder, default=PoolingMode.MEAN)
        loaded = shortened(loaded, recipe.max_len)
        readout = Pooler(recipe, loaded.text_config.hidden_size, device.torch_device)
        encoder = EncoderModel(loaded.model, device, read_hidden_states(readout))
    max_model_len = _encoder_len(fitted_into_a_step(loaded, config), config)
    _try_encoder(encoder, config, device, stage, replace(loaded, checkpoint_len=max_model_len))
    pooling = PoolingFacts(
        task=POOLING_TASKS[kind.task], num_dimensions=readout.num_dimensions, prompt=PromptComputation.AT_ONCE
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


def refuse_useless_options(config: WorkerConfig) -> None:
    """Raise StartupError for options that have no effect on an encoder."""
    for flag, value in (
        ("--kv-cache-memory", config.kv_cache_bytes),
        ("--swap-space", config.swap_space_bytes),
    ):
        if value:
            raise StartupError(f"{flag}: an encoder has no KV cache", fix="leave it out")
    refuse_quantization(config, ": the layers of encoders are not quantized")


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


def shortened(loaded: LoadedModel, length: int | None) -> LoadedModel:
    """Cut the context window to `length` tokens."""
    return loaded if length is None else replace(loaded, checkpoint_len=min(loaded.checkpoint_len, length))


def fitted_into_a_step(loaded: LoadedModel, config: WorkerConfig) -> LoadedModel:
    """Cut the context window to the prompts that one step can hold."""
    asked, step = config.max_model_len, config.max_num_batched_tokens
    if asked is not None and step < asked <= loaded.checkpoint_len:
        raise StartupError(
            f"max_model_len {asked}: prompts of this model are computed in one step, of {step} tokens",
            fix=f"give --max-num-batched-tokens {asked} too, or ask for --max-model-len {step}",
        )
    return shortened(loaded, step)


def no_single_score(loaded: LoadedModel) -> StartupError:
    """Make the error for a head that does not give one score."""
    model_config: Any = loaded.model.config
    return FamilyRefused(
        f"this {loaded.model_type} checkpoint has {model_config.num_labels} outputs, not one score"
    )
