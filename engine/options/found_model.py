"""The checkpoint that the operator names: a folder, a GGUF file, or a model in the local hub cache.

Never: downloads, or reads weights.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from engine.options.declaration import OptionError, UnservableModel
from worker.checkpoint.checksums import Checksums
from worker.checkpoint.gguf.file import WEIGHTS as GGUF_WEIGHTS
from worker.checkpoint.gguf.file import begins_as_gguf
from worker.checkpoint.gguf.folder import folder_of
from worker.checkpoint.tokenizer_files import TOKENIZER, find_vocabulary
from worker.worker_errors import StartupError

DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo_model"
_DEMO_NAME = "tokenyard-demo"
GGUF_SUFFIX = ".gguf"


def find_model(
    model: str | None, environment: Mapping[str, str], *, is_draft: bool = False
) -> tuple[Path, str]:
    """Find the folder of a complete checkpoint, or of a head, and its default name. Raises OptionError."""
    try:
        folder, name = _find(model, environment)
    except (OSError, ValueError, RuntimeError) as error:  # no file can have this name, or be looked for there
        raise OptionError(f"model {str(model)[:200]!r}", str(error)[:200], "check the path") from error
    _check_checkpoint(folder, is_draft=is_draft)
    return folder, name


def _find(model: str | None, environment: Mapping[str, str]) -> tuple[Path, str]:
    if model is None:
        return DEMO_MODEL, _DEMO_NAME
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve(), Path(os.path.abspath(folder)).name  # also where it is a link
    if folder.is_file() and (folder.suffix == GGUF_SUFFIX or begins_as_gguf(folder)):
        return _folder_of_gguf(folder), folder.stem
    if folder.exists():
        raise OptionError(
            f"model {model!r}", "this is a file", f"name the checkpoint's folder, or a {GGUF_SUFFIX} file"
        )
    cached = _find_in_hub_cache(model, environment)
    if cached is None:
        raise OptionError(
            f"model {model!r}",
            "there is no such folder, and no model of this name in the local hub cache",
            "check the path; nothing is downloaded by itself, "
            f"`tokenyard pull {_hub_name(model)}` fetches a model",
        )
    return cached, model


def _hub_name(model: str) -> str:
    return model if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) else "ORG/NAME"


def _folder_of_gguf(path: Path) -> Path:
    try:
        return folder_of(path)
    except StartupError as error:
        raise UnservableModel(f"model {str(path)!r}", error.what, error.fix) from error


def _find_in_hub_cache(model: str, environment: Mapping[str, str]) -> Path | None:
    """Find the snapshot of the branch `main` as it was downloaded.

    Source: the cache layout that huggingface_hub documents: models--ORG--NAME/refs, snapshots.
    """
    parts = model.split("/")
    if len(parts) > 2 or any(part in ("", ".", "..") for part in parts):
        return None
    home = Path(environment.get("HF_HOME", "~/.cache/huggingface"))
    cache = Path(environment.get("HF_HUB_CACHE", home / "hub")).expanduser()
    repository = cache / "--".join(["models", *parts])
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _check_checkpoint(folder: Path, *, is_draft: bool) -> None:
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise OptionError(
            f"model {str(folder)!r}",
            "it is an adapter, no model",
            f"serve the model that it was trained on, with --lora-modules NAME={folder}",
        )
    for name, is_there in (
        ("config.json", (folder / "config.json").is_file()),
        (TOKENIZER, is_draft or find_vocabulary(folder) is not None),
    ):
        if not is_there:
            raise OptionError(
                f"model {str(folder)!r}",
                f"it has no {name}",
                "name the folder of a complete Hugging Face checkpoint",
            )
    if next(folder.glob("*.safetensors"), None) is None and not (folder / GGUF_WEIGHTS).exists():
        raise OptionError(
            f"model {str(folder)!r}",
            "it has no *.safetensors files, the only format of weights that is read (others can run code)",
            "pull a copy that has them, or convert this one where you trust it, a head by "
            "safetensors.torch.save_file(torch.load(OLD, weights_only=True), NEW), and a model by "
            "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW), and the same for AutoTokenizer",
        )


def check_checksums(path: str | None, folder: Path) -> None:
    """Check the list alone; the checkpoint's files are compared where they are read."""
    if path is None:
        return
    if (folder / GGUF_WEIGHTS).exists():
        raise OptionError(
            f"--checksums {path}",
            "it is a list for the files of a folder",
            "compare the GGUF file with sha256sum before the start",
        )
    try:
        Checksums.read(Path(path).absolute())
    except StartupError as error:
        raise OptionError(f"--checksums {path}", error.what, error.fix) from error
