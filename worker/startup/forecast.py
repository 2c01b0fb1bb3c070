"""How the memory would be divided, told before anything is loaded.

Owns: the same arithmetic as at load (startup.py), with what each layer keeps learned in the same way, from
one call of the model, but on tensors that have shapes and no content.
Never: reads weights beyond their headers, or allocates memory for them. What a step takes besides weights
and cache is measured at load only, so that on a GPU the forecast is the most that could be.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from worker.attention.interface import ATTENTION_NAME, active
from worker.attention.kv_cache import BlockLayout
from worker.attention.probe_attention import ProbeAttention
from worker.checkpoint.checkpoint_files import find_weights, loaded_bytes
from worker.devices.device import Device
from worker.machine import available_memory_bytes
from worker.memory_sizes import CacheRequest, CacheSize, cpu_budget_bytes, cuda_budget_bytes, size_cache
from worker.model.rope import longest_right_len
from worker.startup.loader import NO_PAGED_ATTENTION, ModelKind, context_window, dtype_name, refuse_layers
from worker.worker_config import WorkerConfig
from worker.worker_errors import FamilyRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    layout: BlockLayout
    size: CacheSize
    checkpoint_len: int
    """The longest context window that the model could have with enough memory."""


class CannotTell(Exception):
    """The family does not work on tensors without content; loading it may well succeed."""


def weight_bytes(config: WorkerConfig, kind: ModelKind, device: Device) -> int:
    """Once loaded. Raises StartupError for damaged files, and for more than there is memory for."""
    weights = loaded_bytes(find_weights(kind.folder), dtype_name(config.dtype, kind.checkpoint_config))
    device.check_weights(weights)
    return weights.total


def forecast(config: WorkerConfig, kind: ModelKind, device: Device, num_weight_bytes: int) -> Forecast:
    """For a decoder that generates. Raises StartupError for what would not fit, and CannotTell."""
    try:
        model = _build_without_content(kind)
        shapes = _probe(model)
    except KeyError as error:
        if ATTENTION_NAME in error.args:
            raise FamilyRefused(f"{kind.checkpoint_config['model_type']} {NO_PAGED_ATTENTION}") from error
        raise CannotTell(str(error)) from error
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, OSError) as error:
        raise CannotTell(str(error)) from error
    if not shapes:
        raise FamilyRefused(f"{kind.checkpoint_config['model_type']} {NO_PAGED_ATTENTION}")
    layout = BlockLayout(
        layers=dict(sorted(shapes.items())),
        block_size=config.block_size or device.default_block_size,
        dtype=getattr(torch, dtype_name(config.dtype, kind.checkpoint_config) or "float32"),
    )
    text_config = model.config.get_text_config(decoder=True)
    checkpoint_len = longest_right_len(text_config, context_window(text_config), config.max_model_len)
    size = size_cache(
        CacheRequest(
            block_bytes=layout.block_bytes,
            block_size=layout.block_size,
            budget_bytes=_budget_bytes(config, device, num_weight_bytes),
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            checkpoint_len=checkpoint_len,
            max_num_seqs=config.max_num_seqs,
        )
    )
    device.check_swap_space(
        swap_bytes=config.swap_space_bytes, cache_bytes=size.num_blocks * layout.block_bytes
    )
    return Forecast(layout=layout, size=size, checkpoint_len=checkpoint_len)


def _build_without_content(kind: ModelKind) -> Any:
    model_config = AutoConfig.from_pretrained(kind.folder, local_files_only=True, trust_remote_code=False)
    refuse_layers(model_config.get_text_config(decoder=True))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            model_config,
            dtype=torch.bfloat16,  # shapes are the same in all, and torch's grouped products want it
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
        ).eval()


@torch.inference_mode()
def _probe(model: Any) -> dict[int, Any]:
    probe = ProbeAttention()
    with torch.device("meta"), active(probe):
        ids = torch.zeros((1, 2), dtype=torch.int64)
        model(input_ids=ids, position_ids=torch.arange(2)[None], use_cache=False)
    return dict(probe.shapes)


def _budget_bytes(config: WorkerConfig, device: Device, num_weight_bytes: int) -> int:
    """As the device would have it once the weights are there."""
    if device.torch_device.type == "cpu":
        return cpu_budget_bytes(
            available_memory_bytes() - num_weight_bytes,
            asked_bytes=config.kv_cache_bytes,
            swap_bytes=config.swap_space_bytes,
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(device.torch_device)
    return cuda_budget_bytes(
        total_bytes=total_bytes,
        free_bytes=free_bytes - num_weight_bytes,
        activation_bytes=0,
        utilization=config.gpu_memory_utilization,
    )
