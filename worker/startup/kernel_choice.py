"""The kernels of the device that a model is loaded on: CPU or GPU is asked here, once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from worker.attention.kv_cache import KeptShapes
from worker.checkpoint.checkpoint_files import find_weights
from worker.cpu import kernel_choice as cpu_kernel_choice
from worker.devices.device import Device, Reserve
from worker.doctor_findings import Finding
from worker.gpu import kernel_choice as gpu_kernel_choice
from worker.load.draft_kind import refuse_speculation
from worker.load.loader import LoadedModel
from worker.load.model_kind import describe_division
from worker.model.layer_shards import bytes_of_a_rank, refuse_division
from worker.model.toolkit import Toolkit
from worker.progress import LoadPhase, LoadStage
from worker.ranks.ranks import is_divided
from worker.worker_config import DraftMethod, WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError

_HIDDEN_STATES_OF_A_STAGE = 4
"""Copies of a step's hidden states: one received, one of a graph, two being sent (ranks/device_stage.py)."""


class KernelChoice(NamedTuple):
    """The kernels of one kind of device. All of its functions may raise StartupError."""

    foresee: Callable[[WorkerConfig, Device, torch.dtype], Finding]
    """Say what `open_toolkit` will come to; compiles nothing."""
    open_toolkit: Callable[[WorkerConfig, Device, torch.dtype, LoadStage], Toolkit | None]
    """Open the kernels; None where torch computes all."""
    reserve: Callable[[WorkerConfig, LoadedModel], Reserve]
    """Measure the memory that generation holds in addition to weights and KV cache."""
    saturating_tokens: int
    """The rows from which on products get no faster; 0 where more are always better."""
    obstacle_to_adapters: Callable[[WorkerConfig], str]
    """Say why no adapters are computed; empty where they are."""
    stacks_adapters: bool
    """Whether kernels alone compute adapters, in stacks of all slots that take of the cache's memory."""
    fix_of_ranks: str
    """The way to kernels, which ranks need."""
    is_on_host: bool
    """Whether the memory of the device is the host's."""
    why_no_divided_draft: str | None = None
    """The reason why no model drafts on several ranks there; None if one may."""
    why_no_index_keys: str | None = None
    """The reason why layers that choose their keys have no batches there; None if they have."""


def foresee_pictures(model: Any, dtype: torch.dtype) -> int:
    """Size the memory that pictures take on either device, for a model that may be of shapes alone."""
    return cpu_kernel_choice.reserve(model, dtype).weight_bytes


def _reserve_on_gpu(config: WorkerConfig, loaded: LoadedModel) -> Reserve:
    """Reserve memory of a GPU; for a divided model, that of weights too, which its ranks load later."""
    found = gpu_kernel_choice.reserve(
        config,
        loaded.model,
        checkpoint_len=loaded.checkpoint_len,
        vocab_size=loaded.vocab_size,
        dtype=loaded.dtype,
    )
    if not is_divided(loaded.ranks):
        num_bytes = foresee_pictures(loaded.model, loaded.dtype)
        return found._replace(buffer_bytes=found.buffer_bytes + num_bytes)
    ranks = loaded.ranks
    num_layers, hidden_size = loaded.text_config.num_hidden_layers, loaded.text_config.hidden_size
    own = replace(ranks.stage, head_layers=loaded.head_layers(num_layers))
    buffer_bytes = found.buffer_bytes
    if own.count > 1:
        num_numbers = config.max_num_batched_tokens * hidden_size
        buffer_bytes += _HIDDEN_STATES_OF_A_STAGE * num_numbers * loaded.dtype.itemsize
    stages, num_shards = [own], 1
    if config.num_devices == 1:  # the others' weights and buffers are on the same device
        stages, num_shards = [replace(own, index=index) for index in range(own.count)], ranks.size
    num_bytes = sum(buffer_bytes + bytes_of_a_rank(loaded.model, ranks.size, each) for each in stages)
    return Reserve(found.num_graphs, num_shards * num_bytes)


_ON_CPU = KernelChoice(
    cpu_kernel_choice.foresee_kernels,
    cpu_kernel_choice.open_toolkit,
    lambda _config, loaded: cpu_kernel_choice.reserve(loaded.model, loaded.dtype),
    saturating_tokens=256,  # docs/benchmarks/serving.md has the measurement
    obstacle_to_adapters=lambda _config: "",
    stacks_adapters=False,
    is_on_host=True,
    fix_of_ranks="install g++, ask for --dtype bfloat16 or float32, or leave --cpu-kernels on",
)
_ON_GPU = KernelChoice(
    gpu_kernel_choice.foresee_kernels,
    gpu_kernel_choice.open_toolkit,
    _reserve_on_gpu,
    saturating_tokens=0,
    obstacle_to_adapters=gpu_kernel_choice.obstacle,
    stacks_adapters=True,
    is_on_host=False,
    fix_of_ranks="install triton, gcc and Python's headers, or leave --gpu-kernels on",
    why_no_divided_draft="a draft model is not divided over ranks of GPUs yet",
    why_no_index_keys="which GPUs do not compute in batches yet",
)


def kernels_of(device: Device) -> KernelChoice:
    """Return the kernels for this device."""
    return _ON_GPU if device.is_gpu else _ON_CPU


def refuse_kept(model_type: str, kept: KeptShapes, config: WorkerConfig, device: Device) -> None:
    """Raise FamilyRefused for layers that are not computed in batches, StartupError for some in stages."""
    if kept.has_index_keys and (reason := kernels_of(device).why_no_index_keys) is not None:
        raise FamilyRefused(f"{model_type} has layers that choose their keys, {reason}")
    if kept.has_index_keys and config.num_stages > 1:
        reason = "it has layers that choose their keys, which stages do not divide yet"
        raise refuse_division(describe_division(config), reason)
    if kept.states and device.is_gpu and config.num_ranks * config.num_stages > 1:
        divided = "stages" if config.num_stages > 1 else "ranks"
        raise FamilyRefused(f"{model_type} has recurrent layers, which {divided} on GPUs do not divide yet")


def open_kernels(
    config: WorkerConfig, device: Device, stage: LoadStage, loaded: LoadedModel
) -> Toolkit | None:
    """Open the kernels, and the exchange of ranks, which needs them; without any, copy the weights.

    Raises StartupError.
    """
    toolkit = kernels_of(device).open_toolkit(config, device, loaded.dtype, stage)
    if is_divided(loaded.ranks):
        if toolkit is None:
            raise StartupError(
                f"{describe_division(config)} needs the {device.kind} kernels, and there are none",
                fix=kernels_of(device).fix_of_ranks,
            )
        toolkit.divide_among(loaded.ranks)
        loaded.ranks.check_same("software and checkpoint", _describe_origin(config))
        loaded.ranks.check_same("devices", device.describe())
    elif toolkit is None:
        loaded.weights.settle(stage)
    else:
        return toolkit
    stage.enter(LoadPhase.MEASURING)
    return toolkit


def _describe_origin(config: WorkerConfig) -> str:
    """Name the versions and files that the shards of all ranks must come from."""
    words = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    if config.model_path:
        for file in find_weights(Path(config.model_path)):
            words.append(f"{file.path.name} {file.num_bytes}")
            if (
                config.num_nodes == 1
            ):  # with several, contents were compared when a node came: times differ there
                words.append(str(file.path.stat().st_mtime_ns))
    return ", ".join(words)


def takes_heads_unasked(config: WorkerConfig, device: Device) -> bool:
    """Tell whether a head is taken by itself: where its gain was measured."""
    return config.num_ranks == 1 and not device.is_gpu


def verifies_drafts(config: WorkerConfig, device: Device) -> bool:
    """Tell whether steps verify drafts. Raises StartupError for speculation that there is none of."""
    if config.num_stages > 1:
        refuse_speculation(config, "stages verify no drafts yet")
        return False
    has_model = config.speculation.method in (DraftMethod.DRAFT_MODEL, DraftMethod.MTP)
    reason = kernels_of(device).why_no_divided_draft
    if has_model and config.num_ranks > 1 and reason is not None:
        refuse_speculation(config, f"{reason}; ngram and suffix are verified there")
    return True
