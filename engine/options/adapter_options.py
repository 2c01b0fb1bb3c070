"""The options of adapters (LoRA), spelled as vLLM spells them."""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from engine.options.declaration import Arity, Group, OptionError, declared, refuse_given
from engine.options.values import Count, Text
from worker.worker_config import AdapterFolder, AdapterLimits

MAX_ADAPTERS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_FLAG = "--lora-modules"
_DEFAULT_MAX_LORAS = 4
_DEFAULT_MAX_RANK = 64
_EXAMPLE = "write sql=/adapters/sql, say"

_model = partial(declared, Group.MODEL)


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options of adapters: a part of Options."""

    lora_modules: tuple[str, ...] = _model(
        Text(metavar="NAME=FOLDER"),
        'LoRA adapter that requests choose by its name in `model`; or JSON: {"name": "a", "path": "b"}. '
        "Repeat it for several. Folders as peft saves them, with safetensors.",
        arity=Arity.MANY,
        open_default="none",
    )
    lora_directory: str | None = _model(
        Text(metavar="FOLDER"),
        "Folder whose folders hold adapters that may be loaded and unloaded while the server runs, by "
        "/v1/load_lora_adapter and with a key that may administer. Clients name a folder in it and no path.",
        open_default="adapters come and go with the server only",
    )
    max_loras: int | None = _model(
        Count(low=1, high=256, metavar="ADAPTERS"),
        "Different adapters that run at once. More wait less for each other; each one more reads its own "
        "weights in every step.",
        open_default="4",
    )
    max_lora_rank: int | None = _model(
        Count(low=1, high=1024, metavar="RANK"),
        "Highest rank of an adapter. With --max-cpu-loras it says how much memory adapters may take.",
        open_default="64",
    )
    max_cpu_loras: int | None = _model(
        Count(low=1, high=1024, metavar="ADAPTERS"),
        "Adapters in memory. One more takes the place of the one that was used least recently, which is read "
        "from its folder again when it is needed.",
        open_default="twice --max-loras",
    )


class AdapterConfig(NamedTuple):
    """The options, resolved."""

    limits: AdapterLimits
    at_start: tuple[AdapterFolder, ...]
    directory: str | None


def adapter_config(options: AdapterOptions, served_names: tuple[str, ...]) -> AdapterConfig:
    """Check and resolve the options. Raises OptionError."""
    at_start = tuple(_read(word) for word in options.lora_modules)
    directory = None if options.lora_directory is None else Path(options.lora_directory).expanduser()
    if not at_start and directory is None:
        limits = {
            "--max-loras": options.max_loras,
            "--max-lora-rank": options.max_lora_rank,
            "--max-cpu-loras": options.max_cpu_loras,
        }
        refuse_given(limits, "there are no adapters", f"add {_FLAG} or --lora-directory")
        return AdapterConfig(AdapterLimits(), (), None)
    _check_names([adapter.name for adapter in at_start], served_names)
    if directory is not None and not directory.is_dir():
        raise OptionError(
            f"--lora-directory {directory}", "there is no such folder", "make it, or correct it"
        )
    max_loras = options.max_loras or _DEFAULT_MAX_LORAS
    max_in_memory = options.max_cpu_loras or 2 * max_loras
    if max_in_memory < max_loras:
        raise OptionError(
            f"--max-cpu-loras {max_in_memory} with --max-loras {max_loras}",
            "all that run are in memory",
            f"ask for {max_loras} or more",
        )
    return AdapterConfig(
        AdapterLimits(
            max_in_step=max_loras,
            max_in_memory=max_in_memory,
            max_rank=options.max_lora_rank or _DEFAULT_MAX_RANK,
        ),
        at_start,
        None if directory is None else str(directory.resolve()),
    )


def is_adapter_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def _read(word: str) -> AdapterFolder:
    """Read NAME=FOLDER or JSON. Raises OptionError."""
    name, _, path = word.partition("=")
    if word.startswith("{"):
        try:
            fields = json.loads(word)
            name, path = fields["name"], fields["path"]
        except (ValueError, KeyError, RecursionError):
            name = path = ""
        others = set(fields) - {"name", "path", "base_model_name"} if path else set()
        if others:
            raise OptionError(f"{_FLAG} {word}", f"the key {min(others)!r} is not known", _EXAMPLE)
    if not isinstance(name, str) or not isinstance(path, str) or not path or not is_adapter_name(name):
        raise OptionError(f"{_FLAG} {word}", "it is no NAME=FOLDER", _EXAMPLE)
    folder = Path(path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise OptionError(
            f"{_FLAG} {word}", f"{folder} has no adapter_config.json", "name a folder that peft has saved"
        )
    return AdapterFolder(name, str(folder.absolute()))


def _check_names(names: list[str], served_names: tuple[str, ...]) -> None:
    if len(names) > MAX_ADAPTERS:
        raise OptionError(_FLAG, f"there are {len(names)} adapters", f"{MAX_ADAPTERS} are the most")
    for place, name in enumerate(names):
        if name in served_names or name in names[:place]:
            raise OptionError(f"{_FLAG} {name}", "the name is taken", "choose another")
