"""Pooling settings in a checkpoint's sentence-transformers files: from hidden states to one vector.

Owns: modules.json and the folders it names: the pooling mode, dense layers, normalization, the longest
prompt; and the activation of a classification head. An unknown setting is refused.
Source: the folder layout that the sentence-transformers library writes.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from worker.checkpoint.checkpoint_files import read_json
from worker.checkpoint.tokenizer_files import tokenizer_path
from worker.worker_errors import StartupError, refused_as

MODULES_FILE = "modules.json"
_TRANSFORMER_FILE = "sentence_bert_config.json"
_FIX = "serve a checkpoint that pools with cls, mean, max or lasttoken, dense layers and normalization only"


class PoolingMode(StrEnum):
    """Selection of a prompt's hidden states, by sentence-transformers' names."""

    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    LAST = "lasttoken"


class HeadActivation(StrEnum):
    """Activation behind a dense layer or a head, by the last part of torch's name."""

    IDENTITY = "Identity"
    TANH = "Tanh"
    SIGMOID = "Sigmoid"
    RELU = "ReLU"
    GELU = "GELU"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """One linear layer after pooling."""

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: HeadActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRecipe:
    """Steps from the hidden states of a prompt to its vector: pool, dense layers in order, normalize."""

    mode: PoolingMode
    dense_layers: tuple[DenseLayer, ...] = ()
    normalizes: bool = True
    max_len: int | None = None
    """Longest prompt that the model was made for, in tokens; None: its context window."""


_KEYS = {
    "pooling_mode_cls_token": PoolingMode.CLS,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_max_tokens": PoolingMode.MAX,
    "pooling_mode_lasttoken": PoolingMode.LAST,
}


def read_recipe(folder: Path, *, default: PoolingMode) -> PoolingRecipe:
    """Read the files; without any, pool by `default` and normalize. Raises StartupError."""
    with refused_as(partial(StartupError, fix=_FIX), folder / MODULES_FILE):
        return _read_recipe(folder, default)


def _read_recipe(folder: Path, default: PoolingMode) -> PoolingRecipe:
    if not (folder / MODULES_FILE).is_file():
        return PoolingRecipe(mode=default)
    mode = default
    dense_layers = []
    normalizes = False
    for name, path in _modules(folder):
        match name:
            case "Transformer":
                if path != folder:
                    raise _refused(folder / MODULES_FILE, f"the model is in {path.name}")
            case "Pooling":
                mode = _mode(path / "config.json")
            case "Dense" if not normalizes:
                dense_layers.append(_dense_layer(path))
            case "Normalize":
                normalizes = True
            case _:
                raise _refused(folder / MODULES_FILE, f"there is a module {name}")
    return PoolingRecipe(
        mode=mode, dense_layers=tuple(dense_layers), normalizes=normalizes, max_len=_max_len(folder)
    )


def score_activation(checkpoint_config: dict[str, Any]) -> HeadActivation:
    """Read the activation of a head's one output; a sigmoid if the checkpoint names none."""
    named = checkpoint_config.get("sentence_transformers")
    asked = named.get("activation_fn") if isinstance(named, dict) else None
    asked = asked or checkpoint_config.get("sbert_ce_default_activation_function")
    return HeadActivation.SIGMOID if asked is None else _activation(asked, Path("config.json"))


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """List name and folder of each module, in order."""
    path = folder / MODULES_FILE
    modules = json.loads(path.read_text(encoding="utf-8"))
    found = [(str(each["type"]).rsplit(".", 1)[-1], str(each["path"])) for each in modules]
    for _, inner in found:
        if PurePosixPath(inner).is_absolute() or ".." in PurePosixPath(inner).parts:
            raise _refused(path, f"the path {inner!r} leads out of the folder")
    return [(name, folder / inner) for name, inner in found]


def _mode(path: Path) -> PoolingMode:
    content = read_json(path)
    named = content.get("pooling_mode")
    if named is None:
        chosen = [key for key, value in content.items() if key.startswith("pooling_mode_") and value]
        modes = [_KEYS.get(key) for key in chosen]
    else:
        chosen = [str(each) for each in (named if isinstance(named, list) else [named])]
        modes = [PoolingMode(each) if each in set(PoolingMode) else None for each in chosen]
    if len(modes) != 1 or modes[0] is None:
        raise _refused(path, f"it asks for {' and '.join(chosen) or 'no pooling'}")
    return modes[0]


def _dense_layer(folder: Path) -> DenseLayer:
    path = folder / "config.json"
    content = read_json(path)
    sizes = (content.get("in_features"), content.get("out_features"))
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise _refused(path, "in_features and out_features are not both sizes")
    return DenseLayer(
        folder=folder,
        in_features=content["in_features"],
        out_features=content["out_features"],
        has_bias=bool(content.get("bias", True)),
        activation=_activation(content.get("activation_function", "torch.nn.Tanh"), path),
    )


def _activation(named: Any, path: Path) -> HeadActivation:
    name = str(named).removesuffix("()").rsplit(".", 1)[-1]
    if name not in set(HeadActivation):
        raise _refused(path, f"the activation {named!r} is not known")
    return HeadActivation(name)


def _max_len(folder: Path) -> int | None:
    if not (folder / _TRANSFORMER_FILE).is_file():
        return None
    content = read_json(folder / _TRANSFORMER_FILE)
    if content.get("do_lower_case") and not _tokenizer_lowers(folder):
        raise _refused(folder / _TRANSFORMER_FILE, "do_lower_case without such a tokenizer.json")
    length = content.get("max_seq_length")
    return length if isinstance(length, int) and length > 0 else None


def _tokenizer_lowers(folder: Path) -> bool:
    normalizer = read_json(tokenizer_path(folder)).get("normalizer") or {}
    return any(
        each.get("lowercase") is True or each.get("type") == "Lowercase"
        for each in (normalizer, *(normalizer.get("normalizers") or ()))
    )


def _refused(path: Path, reason: str) -> StartupError:
    return StartupError(f"{path} asks for what is not supported: {reason}", fix=_FIX)
