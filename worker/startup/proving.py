"""Proof of a model over its cache: by torch first, then by our own kernels against that."""

import logging
from dataclasses import replace
from typing import NamedTuple

from worker.attention.interface import AttentionBackend
from worker.attention.kv_cache import BlockLayout, KeptShapes, KVCache
from worker.attention.ref_attention import RefAttention
from worker.devices.device import Device
from worker.memory_sizes import format_size
from worker.model.corrections import longest_right_len
from worker.model.layer_replacement import LayerReplacement
from worker.model.quantized_layers import describe_codes, find_codes
from worker.model.toolkit import Toolkit
from worker.progress import LoadPhase
from worker.ranks.ranks import is_divided
from worker.startup.kernel_layers import correct_model, divide_own_layers, put_kernels
from worker.startup.probing import Start
from worker.startup.self_check import LONGEST_CHECK, SelfCheck

log = logging.getLogger(__name__)


class Proven(NamedTuple):
    """The backend that was tried, and the layers that kernels took over."""

    backend: AttentionBackend
    replacement: LayerReplacement | None
    """Report on the layers that kernels compute; None where torch computes all."""


def prove(
    start: Start, whole_layout: BlockLayout, toolkit: Toolkit | None, cache: KVCache, max_model_len: int
) -> Proven:
    """Try the model over the cache, put kernels under it, and try these. Raises StartupError."""
    loaded, device = start.loaded, start.device
    correct_model(loaded, max_model_len)
    start.stage.enter(LoadPhase.WARMING_UP)
    whole_cache = _small_cache(device, whole_layout) if is_divided(loaded.ranks) else cache
    check = _check_of(start, whole_cache, max_model_len)
    expected = check.run()
    stored_codes = find_codes(loaded.model)
    replacement = None
    if toolkit is not None:
        check = replace(check, cache=cache, backend=toolkit.attention_over(cache))
        replacement = put_kernels(start.config, toolkit, check, expected, start.stage, must_round_inputs=True)
    for line in describe_codes(stored_codes, find_codes(loaded.model)):
        log.info("%s", line)
    return Proven(check.backend, replacement)


def prove_draft(
    start: Start,
    kept: KeptShapes,
    whole_layout: BlockLayout,
    toolkit: Toolkit | None,
    cache: KVCache,
    max_model_len: int,
) -> tuple[AttentionBackend, int]:
    """Try a draft model over its layers of `cache`, which stand behind the model's, and put kernels under it.

    Returns the longest sequence that it drafts for, too. Raises StartupError.
    """
    view, loaded = cache.view_beside(kept), start.loaded
    max_model_len = min(longest_right_len(loaded.text_config, loaded.checkpoint_len, None), max_model_len)
    log.info(
        "drafts by %s: weights %s, context %s tokens",
        *(loaded.model_type, format_size(loaded.weight_bytes), max_model_len),
    )
    correct_model(start.loaded, max_model_len)
    is_cut = is_divided(loaded.ranks)
    whole_view = _small_cache(start.device, whole_layout).view_beside(kept) if is_cut else view
    check = _check_of(start, whole_view, max_model_len)
    expected = check.run()
    if toolkit is None:
        return check.backend, max_model_len
    check = replace(check, cache=view, backend=toolkit.attention_over(view))
    if getattr(loaded.model, "has_own_layer", False):  # made otherwise than those that are fused
        if is_cut:
            divide_own_layers(start.config, toolkit, check)
        check.run_again(check.backend, expected)
        return check.backend, max_model_len
    # Options are the model's: they need not have an effect on the draft model.
    put_kernels(start.config, toolkit, check, expected, start.stage, must_round_inputs=False)
    return check.backend, max_model_len


def _check_of(start: Start, cache: KVCache, max_model_len: int) -> SelfCheck:
    return SelfCheck(
        loaded=start.loaded,
        runner=start.runner,
        backend=RefAttention(cache, start.device),
        cache=cache,
        device=start.device,
        max_model_len=max_model_len,
    )


def _small_cache(device: Device, layout: BlockLayout) -> KVCache:
    """Make a cache of whole heads for the check of the model before it is divided."""
    num_blocks = -(-LONGEST_CHECK // layout.block_size) + layout.num_state_blocks
    memory = device.zeros((num_blocks + 1) * layout.block_numel, layout.storage)
    return KVCache(layout, num_blocks, memory)
