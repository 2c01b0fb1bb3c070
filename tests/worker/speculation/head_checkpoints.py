"""Checkpoints with a random draft head, in either layout, for any family."""

import copy
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel


def write_head(folder: Path, source: Path) -> Path:
    """Copy a checkpoint, and add a head: behind the last layer if the family has it there, else as `mtp`."""
    shutil.copytree(source, folder)
    config = AutoConfig.from_pretrained(source).get_text_config()
    is_behind = hasattr(config, "num_mtp_layers")
    prefix = f"model.layers.{config.num_hidden_layers}." if is_behind else "mtp."
    layer_prefix = prefix if is_behind else "mtp.layers.0."
    words = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    if not is_behind:
        words = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    torch.manual_seed(3)
    size = config.hidden_size
    shapes = dict(zip(words, ((size,), (size,), (size, 2 * size), (size,)), strict=True))
    dtype = next(iter(load_file(folder / "model.safetensors").values())).dtype
    head = {f"{prefix}{word}.weight": torch.randn(shape) * 0.3 for word, shape in shapes.items()}
    for name, weight in _layer_of(config, folder / "one").items():
        if name.startswith("layers.0."):
            head[layer_prefix + name.removeprefix("layers.0.")] = weight
    tensors = load_file(folder / "model.safetensors") | {name: each.to(dtype) for name, each in head.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer_of(config: AutoConfig, folder: Path) -> dict[str, torch.Tensor]:
    """Make one layer as a checkpoint of the family has it."""
    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    if getattr(one, "layer_types", None):
        one.layer_types = ["full_attention"]
    if getattr(one, "mlp_layer_types", None):
        one.mlp_layer_types = one.mlp_layer_types[-1:]
    if hasattr(one, "first_k_dense_replace"):
        one.first_k_dense_replace = 0
    AutoModel.from_config(one, dtype=torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    shutil.rmtree(folder)
    found = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for expert, both in enumerate(found.pop(f"layers.0.mlp.experts.{stack}", ())):  # kept one by one
            for part, weight in zip(parts, both.chunk(len(parts)), strict=True):
                found[f"layers.0.mlp.experts.{expert}.{part}.weight"] = weight.contiguous()
    return found
