"""Calls of a loaded model without a cache, which show what its layers keep and how much memory a step takes.

Owns: the layout of a block, the scales of keys and values in eight bits, and the largest step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from worker.attention.kv_cache import (
    FLOAT8,
    BlockLayout,
    KeptShapes,
    cache_dtype,
    check_states,
    scale_for,
)
from worker.attention.probe_attention import ProbeAttention, SharingProbe, share_layers
from worker.checkpoint.checkpoint_files import find_checkpoint, find_weights
from worker.devices.device import Device
from worker.load.cache_scales import read_cache_scales
from worker.load.loader import LoadedModel
from worker.load.model_kind import NO_PAGED_ATTENTION
from worker.model.quantized_layers import skipping_products
from worker.model.stage_layers import noting_layers
from worker.progress import LoadStage
from worker.startup.kernel_choice import refuse_kept
from worker.startup.self_check import Runner, refusing
from worker.steps.tokens import StepTokens
from worker.worker_config import WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError

_MEASURED_TOKENS = 128
_SEED = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A loaded model, and what it starts with."""

    config: WorkerConfig
    device: Device
    stage: LoadStage
    loaded: LoadedModel
    runner: Runner


def probe(
    runner: Runner,
    device: Device,
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
    *,
    num_logits: int,
    token_ids: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None,
) -> ProbeAttention:
    """Run one sequence without a cache, of tokens 0 unless others are given."""
    attention = ProbeAttention()
    num_tokens = len(positions)
    wanted = np.arange(num_tokens - num_logits, num_tokens)
    ids = np.zeros(num_tokens, np.int64) if token_ids is None else token_ids
    runner.forward(StepTokens.of(device, ids, positions, wanted), attention)
    return attention


def probe_shapes(device: Device, loaded: LoadedModel, runner: Runner) -> KeptShapes:
    """Read each layer's shape from one call; of layers that share keys and values, the first has them.

    Raises StartupError if the model calls another attention.
    """
    found = SharingProbe()
    with refusing(loaded.model_type), skipping_products(), noting_layers(loaded.model, found):
        runner.forward(
            StepTokens.of(device, np.zeros(2, np.int64), np.arange(2), np.ones(1, np.int64)), found
        )
    share_layers(loaded.model, found.shared)
    if not (found.shapes or found.states.shapes):
        raise FamilyRefused(f"{loaded.model_type} {NO_PAGED_ATTENTION}")
    return found.kept


def probe_layout(start: Start) -> BlockLayout:
    """Lay out a block of all layers and heads. Raises StartupError."""
    config, device, loaded = start.config, start.device, start.loaded
    dtype = cache_dtype(config.kv_cache_dtype, loaded.dtype)
    kept = probe_shapes(device, loaded, start.runner)
    refuse_kept(loaded.model_type, kept, config, device)
    scales: dict[int, tuple[float, float]] = {}
    if dtype is FLOAT8:
        scales = read_cache_scales(find_weights(find_checkpoint(config.model_path)))
        if not kept.layers.keys() <= scales.keys():
            scales = _measure_scales(start) | scales
    whole = kept.with_beside(loaded.beside)
    layout = BlockLayout(
        layers=whole.layers,
        state_shapes=whole.states,
        block_size=config.block_size or device.default_block_size,
        dtype=dtype,
        scales=scales,
        together=whole.together,
    )
    check_states(layout)
    return layout


def _measure_scales(start: Start) -> dict[int, tuple[float, float]]:
    """Find the scales of each layer's keys and values from a sequence of random tokens."""
    loaded = start.loaded
    length = min(_MEASURED_TOKENS, loaded.checkpoint_len)
    ids = np.random.default_rng(_SEED).integers(0, loaded.vocab_size, length)
    with refusing(loaded.model_type):
        found = probe(start.runner, start.device, np.arange(length), num_logits=1, token_ids=ids)
    scales = {}
    for layer_idx, (key, value) in found.largest.items():
        sizes = float(key), float(value)
        if not all(map(math.isfinite, sizes)):
            raise StartupError(
                f"layer {layer_idx} has keys or values that are not finite: they have no scale for fp8",
                fix="leave --kv-cache-dtype out",
            )
        scales[layer_idx] = scale_for(sizes[0]), scale_for(sizes[1])
    return scales


def largest_step(start: Start, checkpoint_len: int) -> Callable[[], None]:
    """Make a step of the most tokens, whose memory is measured."""
    num_tokens = start.config.max_num_batched_tokens
    positions = np.arange(num_tokens) % checkpoint_len

    def run() -> None:
        with refusing(start.loaded.model_type):
            num_logits = min(start.config.max_num_seqs, num_tokens)
            probe(start.runner, start.device, positions, num_logits=num_logits)

    return run
