"""A checkpoint folder for a GGUF file: what it says as JSON, and a link to it for its weights.

Owns: the folder, in the user's cache, so that all that reads checkpoints need not know the format.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker.checkpoint.gguf.config import config_of
from worker.checkpoint.gguf.file import WEIGHTS, other_file, part_paths, read_parts
from worker.checkpoint.gguf.tokenizer import tokenizer_of
from worker.checkpoint.vocabularies.cache_folder import VOCABULARIES, made_once
from worker.worker_errors import refused_as

_SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), *VOCABULARIES)
"""A folder that others of these modules wrote is not used."""


def folder_of(path: Path) -> Path:
    """Write the folder, unless it is there for just this file. Raises StartupError."""
    paths = [each.resolve() for each in part_paths(path)]

    def write(folder: Path) -> None:
        for name, content in _texts_of(paths).items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for number, each in enumerate(paths, 1):
            (folder / (WEIGHTS if number == 1 else f"model-{number}.gguf")).symlink_to(each)

    return made_once("gguf", paths, _SOURCES, write)


def _texts_of(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The folder's files by name."""
    file, _ = read_parts(paths)
    said = f"what {file.path} says of its model"
    with refused_as(other_file, said):
        config = config_of(file)  # which tells first what is no language model at all
        tokenizer, tokenizer_config = tokenizer_of(file)
        return {
            "config.json": config,
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": tokenizer_config,
        }
