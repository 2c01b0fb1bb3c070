"""Start of a model whose sequences have caches of their own, because a paged KV cache does not fit.

Owns: the trial whether the family's caches can be kept, and the memory of a sequence's cache.
Never: tries a family that the paged KV cache can serve: these steps are several times slower.
"""

import logging
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.devices.device import Device
from worker.load.loader import LoadedModel, load_model
from worker.load.model_kind import ModelKind
from worker.memory_sizes import CacheRequest, CacheSize, size_cache
from worker.model.quantization import refuse_quantization
from worker.model.quantized_layers import describe_codes, find_codes
from worker.own_cache.model import OwnCacheModel, SequenceCache, num_bytes
from worker.own_cache.steps import OwnCacheSteps
from worker.progress import LoadPhase, LoadStage
from worker.startup.self_check import TOLERANCE, refusing, relative_error
from worker.startup.start_adapters import open_adapters, refuse_adapters_alone, targets_of
from worker.worker_config import ModelFacts, WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError

log = logging.getLogger(__name__)

_SEED = 7
_NUM_TOKENS = 32
_FIRST_SINGLE = 20
_CUTS = (0, 9, *range(_FIRST_SINGLE, _NUM_TOKENS + 1))
"""A first chunk, a later one, single tokens."""
_MOST_OF_BUDGET = 0.5
"""Largest part of the cache for states of fixed size, summed over all sequences that may run at once."""


class CacheTrial(NamedTuple):
    """Use of a family's caches, and its measurements."""

    is_kept: bool
    fixed_bytes: int
    """Bytes of one sequence's cache for any length: recurrent states."""
    bytes_per_token: int
    error: float
    """Error of the logits over their size: the largest median of a chunk, or of the single tokens."""

    def describe(self) -> str:
        return "in chunks" if self.is_kept else "all tokens again for each one"


def start_with_own_caches(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage, refused: str
) -> tuple[ModelFacts, OwnCacheSteps]:
    """Load and try; `refused` says why there is no paged KV cache. Raises StartupError."""
    _refuse_useless_options(config, refused)
    refuse_adapters_alone(config, device, refused)
    loaded = load_model(config, replace(kind, keeps_own_cache=True), device, stage)
    model = OwnCacheModel(loaded.model, loaded.vocab_size)
    codes = find_codes(loaded.model)
    for line in describe_codes(codes, left=codes):
        log.info("%s", line)
    stage.enter(LoadPhase.MEASURING)
    trial = try_caches(model, loaded, refused)
    is_kept = trial.is_kept

    def run_step(num_tokens: int) -> object:
        return model.compute([0] * num_tokens, SequenceCache(is_kept), num_logits=1)

    targets = targets_of(config, device, loaded.model, run_step)

    def run_largest_step() -> None:
        longest = min(config.max_model_len or loaded.checkpoint_len, loaded.checkpoint_len)
        with refusing(loaded.model_type):
            run_step(min(config.max_num_batched_tokens, longest) if is_kept else longest)

    budget_bytes = device.kv_cache_budget_bytes(run_largest_step)
    size = _size(config, device, loaded, trial, budget_bytes)
    stage.enter(LoadPhase.WARMING_UP)
    log.warning(
        "%s; transformers alone computes, one sequence after the other, %s: expect a fraction of the speed",
        refused,
        trial.describe(),
    )
    facts = _facts(config, device, loaded, trial, size)
    adapters, adapter_facts = open_adapters(config, loaded, targets, cache_bytes=facts.kv_cache_bytes)
    facts = replace(facts, adapters=adapter_facts)
    steps = OwnCacheSteps(config, device, facts, loaded, model, keeps_caches=is_kept)
    if adapters is not None:
        steps.adapt(adapters)
    return facts, steps


def try_caches(model: OwnCacheModel, loaded: LoadedModel, refused: str) -> CacheTrial:
    """Keep caches if the model's own logits come of it. Raises FamilyRefused if they come in neither way."""
    token_ids = np.random.default_rng(_SEED).integers(0, loaded.vocab_size, (2, _NUM_TOKENS)).tolist()
    with refusing(loaded.model_type):
        expected = [
            model.compute(ids, SequenceCache(is_kept=False), num_logits=_NUM_TOKENS) for ids in token_ids
        ]
    is_finite = all(bool(logits_TV.isfinite().all()) for logits_TV in expected)
    reasons = []
    for is_kept in (True, False):
        try:
            found = _try(model, token_ids, expected, is_kept=is_kept)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as failure:
            reasons.append(type(failure).__name__)
            continue
        # With damaged weights requests will fail one by one, and say so.
        if found.error <= TOLERANCE[loaded.dtype] or not is_finite:
            return found
        reasons.append(f"{found.describe()}: error {found.error:.2g}")
    log.info("%s is no better with a cache of its own: %s", loaded.model_type, ", ".join(reasons))
    raise FamilyRefused(refused)


def _try(
    model: OwnCacheModel, token_ids: list[list[int]], expected: list[Tensor], *, is_kept: bool
) -> CacheTrial:
    """Run two sequences in turns, so that a state of one that stays in the model spoils the other."""
    caches = [SequenceCache(is_kept), SequenceCache(is_kept)]
    bytes_after: dict[int, int] = {}
    errors: list[float] = []
    singles: list[tuple[Tensor, Tensor]] = []
    for start, end in pairwise(_CUTS):
        for ids, cache, expected_TV in zip(token_ids, caches, expected, strict=True):
            num_logits = end - start if is_kept else 1
            found_TV = model.compute(ids[:end], cache, num_logits=num_logits).float()
            wanted_TV = expected_TV[end - num_logits : end].float()
            if num_logits > 1:
                errors.append(relative_error(found_TV, wanted_TV))
            else:
                singles.append((found_TV, wanted_TV))
        bytes_after[end] = num_bytes(caches[0])
    found_TV, wanted_TV = (torch.cat(each) for each in zip(*singles, strict=True))
    errors.append(relative_error(found_TV, wanted_TV))
    first, last = min(bytes_after), max(bytes_after)
    per_token = -(-max(0, bytes_after[last] - bytes_after[first]) // (last - first))
    fixed = max(0, bytes_after[first] - first * per_token)
    return CacheTrial(is_kept, fixed, per_token, max(errors))


def _size(
    config: WorkerConfig, device: Device, loaded: LoadedModel, trial: CacheTrial, budget_bytes: int
) -> CacheSize:
    """Size the cache, in blocks that stand for memory. Raises StartupError."""
    block_size = config.block_size or device.default_block_size
    fixed_bytes = trial.fixed_bytes * config.max_num_seqs
    if fixed_bytes > budget_bytes * _MOST_OF_BUDGET:
        fits = int(budget_bytes * _MOST_OF_BUDGET) // trial.fixed_bytes
        raise StartupError(
            f"the states of {config.max_num_seqs} sequences take {fixed_bytes} bytes, more than half of the "
            f"{budget_bytes} bytes for the cache",
            fix=f"ask for --max-num-seqs {max(fits, 1)} or less, or give the cache more (--kv-cache-memory)",
        )
    return size_cache(
        CacheRequest(
            # A cache that does not grow takes no blocks: 1 byte each, so that they never run out.
            block_bytes=max(1, block_size * trial.bytes_per_token),
            block_size=block_size,
            budget_bytes=budget_bytes - fixed_bytes,
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            checkpoint_len=loaded.checkpoint_len,
            max_num_seqs=config.max_num_seqs,
            num_step_tokens=config.max_num_batched_tokens,
        )
    )


def _facts(
    config: WorkerConfig, device: Device, loaded: LoadedModel, trial: CacheTrial, size: CacheSize
) -> ModelFacts:
    block_size = config.block_size or device.default_block_size
    return loaded.facts(
        device,
        max_model_len=size.max_model_len,
        block_size=block_size,
        num_blocks=size.num_blocks,
        kv_cache_bytes=size.num_blocks * block_size * trial.bytes_per_token
        + trial.fixed_bytes * config.max_num_seqs,
        groups=(),
    )


def _refuse_useless_options(config: WorkerConfig, refused: str) -> None:
    reason = f" needs a paged KV cache, and {refused}"
    if config.swap_space_bytes > 0:
        raise StartupError(f"--swap-space {config.swap_space_bytes}{reason}", fix="leave it out")
    if config.kv_cache_dtype != "auto":
        raise StartupError(f"--kv-cache-dtype {config.kv_cache_dtype}{reason}", fix="leave it out")
    refuse_quantization(config, reason)
