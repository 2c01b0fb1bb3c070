"""Files of a checkpoint's weights: the memory that they take once loaded, and the first read of them.

Owns: the choice whether kernels take the weights over layer by layer, and the comparison with checksums.
"""

import logging
from dataclasses import replace
from pathlib import Path

from worker.attention.latents import EXPANSION
from worker.checkpoint.checkpoint_files import (
    WeightFile,
    bytes_not_taken,
    find_weights,
    loaded_bytes,
    warm_page_cache,
)
from worker.checkpoint.checksums import Checksums
from worker.devices.device import Device
from worker.load.model_kind import ModelKind, dtype_name, torch_dtype
from worker.machine import available_memory_bytes
from worker.memory_sizes import WeightBytes, check_host_memory, check_weights_fit
from worker.progress import LoadPhase, LoadStage
from worker.worker_config import WorkerConfig

log = logging.getLogger(__name__)

_LATENT_SIZES = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
_PLAIN_DTYPES = frozenset({"BF16", "F16", "F32"})
_BITS = {"int8": 8, "int4": 4.5}
"""Bits of a number, with its share of a group's scale, by the words of --quantization."""


def bytes_to_load(
    config: WorkerConfig, kind: ModelKind, files: list[WeightFile], device: Device
) -> WeightBytes:
    """Size the weights as a load takes them: rounded layer by layer on a CPU, if they are to be."""
    dtype = dtype_name(config.dtype, kind.checkpoint_config)
    weights, num_bits = loaded_bytes(files, dtype), _BITS.get(config.quantization)
    weights = replace(weights, total=weights.total + _expanded_bytes(config, kind, files))
    is_alone = config.num_ranks == config.num_stages == 1
    if num_bits is None or not is_alone or not awaits_kernels(config, kind, device):
        return weights
    rounds_head = config.quantize_head != "none"
    not_taken = bytes_not_taken(files, dtype, num_bits=num_bits, rounds_head=rounds_head)
    return replace(weights, total=weights.total - not_taken)


def _expanded_bytes(config: WorkerConfig, kind: ModelKind, files: list[WeightFile]) -> int:
    """Size the products that expand latents (latents.py) and are codes in the files: they become numbers."""
    content = kind.checkpoint_config.get("text_config") or kind.checkpoint_config
    num_heads, key_dim, value_dim, latent_dim = (content.get(key) or 0 for key in _LATENT_SIZES)
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    modules = {name.rpartition(".")[0] for name in tensors if f".{EXPANSION}." in name}
    codes = [
        name
        for name in modules
        if f"{name}.weight" not in tensors or tensors[f"{name}.weight"].dtype not in _PLAIN_DTYPES
    ]
    num_numbers = len(codes) * num_heads * (key_dim + value_dim) * latent_dim
    return num_numbers * torch_dtype(config.dtype, kind).itemsize if kind.quantization is not None else 0


def weight_bytes(config: WorkerConfig, kind: ModelKind, device: Device) -> int:
    """Size the weights once loaded. Raises StartupError for damaged files, and if they do not fit."""
    weights = foreseen_weights(config, kind, device)
    device.check_weights(weights.on_one_of(config.num_devices, config.num_nodes))
    return weights.total


def foreseen_weights(config: WorkerConfig, kind: ModelKind, device: Device) -> WeightBytes:
    """Size the weights of a model that is yet to be loaded. Raises StartupError for damaged files."""
    return bytes_to_load(config, kind, find_weights(kind.folder), device)


def awaits_kernels(config: WorkerConfig, kind: ModelKind, device: Device) -> bool:
    """Tell whether kernels are to take the weights over, which copies them."""
    is_replaced = not (kind.is_encoder or kind.keeps_own_cache)
    return is_replaced and device.torch_device.type == "cpu" and config.cpu_kernels != "off"


def read_weights(
    config: WorkerConfig, folder: Path, files: list[WeightFile], stage: LoadStage, left_bytes: int
) -> None:
    """Bring the files into the page cache, and compare them on the way if there is a list of checksums."""
    file_bytes = sum(file.num_bytes for file in files)
    if config.checksums_file is None and file_bytes > left_bytes:
        return  # the first pages would be gone again before they are used
    stage.enter(LoadPhase.READING, total_bytes=file_bytes)
    if config.checksums_file is not None:
        checksums = Checksums.read(Path(config.checksums_file))
        checksums.check_weights(folder, [file.path for file in files], stage.count)
        log.info("all files are as %s lists them", checksums.path)
    else:
        warm_page_cache(files, stage.count)


def refuse_engines(config: WorkerConfig, device: Device, num_weight_bytes: int) -> None:
    """Raise StartupError if the engines, which have the host's memory in common, do not fit together."""
    available_bytes = available_memory_bytes()
    where = f"this machine, for {config.num_engines} engines,"
    if device.kind == "CPU":
        num_bytes = config.num_engines * num_weight_bytes
        available_bytes = check_weights_fit(num_bytes, available_bytes=available_bytes, where=where)
    check_host_memory(
        available_bytes,
        cache_bytes=0 if device.kind == "GPU" else config.num_engines * (config.kv_cache_bytes or 0),
        swap_bytes=config.num_engines * config.swap_space_bytes,
    )
