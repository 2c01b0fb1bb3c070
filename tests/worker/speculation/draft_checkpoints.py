"""Draft models for the demo model: the model itself, or its first layers."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def write_draft(folder: Path, source: Path, *, num_layers: int) -> Path:
    """Write a checkpoint with the first layers of another, and all that is around them."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if _layer_of(name) < num_layers}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer_of(name: str) -> int:
    return next((int(word) for word in name.split(".") if word.isdecimal()), -1)
