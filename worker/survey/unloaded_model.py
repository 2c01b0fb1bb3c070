"""A model without content: its layers, and what they keep of a token, without a weight in memory."""

from dataclasses import replace
from typing import Any

import torch

from worker.adapters.targets import Targets
from worker.attention.interface import ATTENTION_NAME, active
from worker.attention.kv_cache import KeptShapes
from worker.attention.probe_attention import ProbeAttention, SharingProbe
from worker.checkpoint.checkpoint_files import find_weights
from worker.checkpoint.task_choice import generating_class
from worker.devices.device import Device
from worker.load.build import compress
from worker.load.model_kind import (
    NO_PAGED_ATTENTION,
    ModelKind,
    model_config_of,
    refuse_layers,
    torch_dtype,
)
from worker.load.quantized_loading import without_quantization
from worker.load.recurrent_functions import knows_recurrence, replace_functions
from worker.model.stage_layers import noting_layers
from worker.startup.start_adapters import targets_of
from worker.worker_config import WorkerConfig
from worker.worker_errors import FamilyRefused


class CannotForesee(Exception):
    """The model's code fails on tensors without content; loading it may still succeed."""


def foresee_layers(config: WorkerConfig, kind: ModelKind, device: Device) -> tuple[Any, KeptShapes, Targets]:
    """Build the model without content, and see what its layers keep. Raises as `forecast` does."""
    try:
        model = _build(kind)
        kept, targets = _probe(model, config, device)
    except KeyError as error:
        if ATTENTION_NAME in error.args:
            raise FamilyRefused(f"{kind.checkpoint_config['model_type']} {NO_PAGED_ATTENTION}") from error
        raise CannotForesee(str(error)) from error
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, OSError) as error:
        raise CannotForesee(str(error)) from error
    if not (kept.layers or kept.states):
        raise FamilyRefused(f"{kind.checkpoint_config['model_type']} {NO_PAGED_ATTENTION}")
    dtype = torch_dtype(config.dtype, kind)  # which the model without content has not
    states = {idx: replace(each, input_dtype=dtype) for idx, each in kept.states.items()}
    return model, kept._replace(states=states), targets


def _build(kind: ModelKind) -> Any:
    model_config = model_config_of(kind, find_weights(kind.folder))
    if not knows_recurrence(model_config):
        refuse_layers(model_config.get_text_config(decoder=True))
    with torch.device("meta"):
        model = (
            generating_class(model_config)
            .from_config(
                without_quantization(model_config),  # which asks for no other KV cache
                dtype=torch.bfloat16,  # shapes do not depend on it, and torch's grouped products need it
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
            )
            .eval()
        )
    compress(model, None)
    replace_functions(model)
    for module in model.modules():
        if hasattr(module, "identity_expert"):  # such experts ask which of them have tokens
            module.forward = lambda hidden_TH, *_: hidden_TH
    return model


@torch.inference_mode()
def _probe(model: Any, config: WorkerConfig, device: Device) -> tuple[KeptShapes, Targets]:
    def run(num_tokens: int) -> ProbeAttention:
        probe = SharingProbe()
        with torch.device("meta"), active(probe), noting_layers(model, probe):
            ids = torch.zeros((1, num_tokens), dtype=torch.int64)
            model(input_ids=ids, position_ids=torch.arange(num_tokens)[None], use_cache=False)
        return probe

    return run(2).kept, targets_of(config, device, model, run)
