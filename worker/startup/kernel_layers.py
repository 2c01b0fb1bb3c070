"""Our own kernels in the place of a loaded model's layers, proven before and after.

Owns: the order in which products are proven, layers are replaced and the whole is tried again; and the
refusal of options that have no effect then.
"""

import logging
from typing import Any

from torch import Tensor

from worker.devices.weight_life import refusing_out_of_memory
from worker.load.loader import LoadedModel
from worker.load.model_kind import describe_division
from worker.model.corrections import fix_rope, fix_temperatures
from worker.model.layer_parts import Unrecognised
from worker.model.layer_replacement import LayerReplacement, replace_layers
from worker.model.layer_shards import refuse_division, shard_own_layer
from worker.model.quantization import rounding_of
from worker.model.toolkit import Toolkit
from worker.progress import LoadPhase, LoadStage
from worker.ranks.ranks import is_divided
from worker.startup.self_check import SelfCheck
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)


def correct_model(loaded: LoadedModel, max_model_len: int) -> None:
    """Correct what transformers' model computes wrongly in a batch of several lengths."""
    fix_rope(loaded.model, loaded.text_config, max_model_len)
    fix_temperatures(loaded.model)


def put_kernels(
    config: WorkerConfig,
    toolkit: Toolkit,
    check: SelfCheck,
    expected: Tensor,
    stage: LoadStage,
    *,
    must_round_inputs: bool,
) -> LayerReplacement:
    """Prove the products, replace layers, by the shards of this rank where there are several, and try them.

    Raises StartupError.
    """
    with toolkit.refusing_kernels(), refusing_out_of_memory(check.device, "kernels took over the weights"):
        toolkit.prove(check.loaded.model, must_round_inputs=must_round_inputs)
        replacement = _replace_layers(config, toolkit, check, stage)
        check.run_again(check.backend, expected, tolerance=rounding_of(config).tolerance)
    return replacement


def divide_own_layers(config: WorkerConfig, toolkit: Toolkit, check: SelfCheck) -> None:
    """Cut the layers of a head that no kernels fuse, each to this rank's part. Raises StartupError."""
    model: Any = check.loaded.model
    try:
        for layer in model.layers:
            shard_own_layer(
                layer, check.loaded.ranks, lambda shard, axis: toolkit.pack_shard(shard, axis, model.dtype)
            )
    except Unrecognised as undivided:
        raise refuse_division(describe_division(config), str(undivided)) from undivided


def _replace_layers(
    config: WorkerConfig, toolkit: Toolkit, check: SelfCheck, stage: LoadStage
) -> LayerReplacement:
    loaded = check.loaded
    loaded.weights.offer()
    replacement = replace_layers(
        loaded.model,
        toolkit,
        check.device,
        max_model_len=check.max_model_len,
        ranks=loaded.ranks,
        free_taken=loaded.weights.free_taken,
    )
    log.info("%s", replacement.describe())
    _refuse_unquantized(config, replacement)
    if is_divided(loaded.ranks):
        _refuse_undivided(config, check, replacement)
    loaded.weights.settle(stage)
    stage.enter(LoadPhase.WARMING_UP)
    return replacement


def _refuse_undivided(config: WorkerConfig, check: SelfCheck, replacement: LayerReplacement) -> None:
    """Raise StartupError if a layer with keys and values stayed whole."""
    ranks = check.loaded.ranks
    num_divided = replacement.num_fused + replacement.num_cut
    ranks.check_same("layers", f"{num_divided} of {replacement.num_layers} divided")
    has_whole_experts = replacement.experts.num_replaced < replacement.experts.num_found
    own_numbers = check.cache.layout.numbers_without(check.loaded.beside)
    is_elsewhere = not replacement.numbers.issuperset(own_numbers)
    is_whole = num_divided < replacement.num_layers or is_elsewhere
    if is_whole or has_whole_experts:
        raise refuse_division(describe_division(config), replacement.describe())


def _refuse_unquantized(config: WorkerConfig, replacement: LayerReplacement) -> None:
    quantization = rounding_of(config).layers
    if quantization is not None and replacement.num_fused == replacement.num_kept_mlps:
        weights = "the MLPs of this model" if replacement.num_fused else "this model"
        raise StartupError(
            f"--quantization {quantization.word} has no effect on {weights} ({replacement.describe()})",
            fix="leave it out, or serve a model whose layers can be fused (docs/models.md)",
        )
