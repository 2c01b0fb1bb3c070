"""Adapters with random weights for the tiny checkpoints, and checkpoints into which one is merged.

Owns: files as peft writes them, made without it; and the oracle: weights plus updates.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(
    folder: Path,
    base: Path,
    *,
    targets: list[str] | None = None,
    rank: int = 8,
    alpha: float = 16,
    seed: int = 1,
    **config: Any,
) -> Path:
    """Write an adapter with an update of every layer that ends with one of `targets`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    targets = LINEARS if targets is None else targets
    tensors = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if weight.dim() == 2 and module.split(".")[-1] in targets:
            num_outputs, num_inputs = weight.shape
            key = f"base_model.model.{module}"
            down = torch.randn((rank, num_inputs), generator=generator) / num_inputs**0.5
            up = torch.randn((num_outputs, rank), generator=generator) * 0.1
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = down, up
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        "bias": "none",
        **config,
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def merge_adapter(folder: Path, base: Path, adapter: Path, *, scale: float = 2.0) -> Path:
    """Write the checkpoint that the adapter makes of its base."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    updates = load_file(adapter / "adapter_model.safetensors")
    for key in [key for key in updates if key.endswith(".lora_A.weight")]:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up = updates[key.replace("lora_A", "lora_B")]
        weights[f"{module}.weight"] += (scale * (up.double() @ updates[key].double())).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
