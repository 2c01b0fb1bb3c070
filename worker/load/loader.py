"""Loader of a checkpoint as a transformers model, with the facts that a start needs of it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker.attention.kv_cache import NOTHING_KEPT, KeptShapes
from worker.checkpoint.checkpoint_files import find_weights
from worker.checkpoint.generation_config import default_sampling, eos_token_ids
from worker.checkpoint.plausible_sizes import check_sizes
from worker.devices.device import Device
from worker.devices.weight_life import WeightLife, refusing_out_of_memory
from worker.load.build import build_model, compress
from worker.load.model_kind import ModelKind
from worker.load.model_sizes import checkpoint_len, head_layers, vocab_size_of
from worker.load.weight_files import awaits_kernels, bytes_to_load, read_weights
from worker.model.mixture import find_experts
from worker.progress import LoadPhase, LoadStage
from worker.ranks.ranks import ALONE, Ranks, is_divided
from worker.worker_config import ModelFacts, WorkerConfig
from worker.worker_errors import StartupError

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Model on its device, and the facts of its checkpoint."""

    model: nn.Module
    dtype: torch.dtype
    model_type: str
    text_config: Any
    """Part of the configuration that describes the language model."""
    num_parameters: int
    weight_bytes: int
    vocab_size: int
    checkpoint_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]
    weights: WeightLife
    has_experts: bool = False
    """Mixture of experts: a token reads the weights of some experts only."""
    beside: KeptShapes = NOTHING_KEPT
    """Keys, values and states of a draft model in the same blocks, behind all layers of this one."""
    ranks: Ranks = ALONE
    """Ranks that are to divide the layers."""

    def facts(self, device: Device, **sizes: Any) -> ModelFacts:
        """Join the facts of the model with the sizes of its cache."""
        return ModelFacts(
            model_type=self.model_type,
            num_parameters=self.num_parameters,
            weight_bytes=self.weight_bytes,
            dtype=str(self.dtype).removeprefix("torch."),
            device=device.describe(),
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            default_sampling=self.default_sampling,
            **sizes,
        )

    def head_layers(self, num_layers: int) -> float:
        """Measure the output layer's weights in layers, of a model with `num_layers`."""
        return head_layers(self.text_config, self.vocab_size, self.num_parameters, num_layers)


def load_model(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage, ranks: Ranks = ALONE
) -> LoadedModel:
    """Load the weights onto the device. Raises StartupError for everything that cannot be served."""
    if config.dtype not in _DTYPES:
        raise StartupError(f"unknown dtype {config.dtype!r}", fix=f"ask for one of {', '.join(_DTYPES)}")
    folder = kind.folder
    sampling = default_sampling(folder, config.sampling_overrides)
    files = find_weights(folder)
    check_sizes(kind.checkpoint_config, files)
    weights = bytes_to_load(config, kind, files, device)
    left_bytes = device.check_weights(weights.on_one_of(config.num_devices, config.num_nodes))
    read_weights(config, folder, files, stage, left_bytes)
    with refusing_out_of_memory(device, f"{weights.total / (1 << 30):.2f} GiB of weights were loaded"):
        stage.enter(LoadPhase.BUILDING)
        model, modules = build_model(kind, config.dtype, files)
        if modules is not None:
            modules.fill(model, device.torch_device)
        if not (kind.is_encoder or kind.keeps_own_cache):
            compress(model, modules)
        life = WeightLife(model, device, [file.path for file in files], modules, weights.total)
        if not (is_divided(ranks) or awaits_kernels(config, kind, device)):
            life.move(stage)
    model.eval()
    text_config = model.config.get_text_config(decoder=True)
    vocab_size = vocab_size_of(model)
    parameters = list(model.parameters())
    quantized = [] if modules is None else modules.weights_of(model)
    return LoadedModel(
        model=model,
        dtype=model.dtype,
        model_type=model.config.model_type,
        text_config=text_config,
        num_parameters=sum(each.numel() for each in parameters)
        + sum(math.prod(each.shape) for each in quantized),
        weight_bytes=sum(each.nbytes for each in parameters) + sum(each.num_bytes for each in quantized),
        vocab_size=vocab_size,
        checkpoint_len=checkpoint_len(config, kind, text_config),
        eos_token_ids=eos_token_ids(folder, (text_config, model.config), vocab_size=vocab_size),
        default_sampling=sampling,
        weights=life,
        has_experts=any(find_experts(model)),
        ranks=ranks,
    )
