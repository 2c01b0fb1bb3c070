"""Checks of options against the machine and config.json, before an engine process is started for them.

Owns: refusing in a second what loading would refuse after many, where two numbers decide it.
Never: decides what a model can do; what is not refused here is judged when it is loaded.
"""

import json
from pathlib import Path
from typing import Any

from engine.options.declaration import OptionError
from engine.options.engine_split import device_of
from engine.options.options import Options
from worker.machine import available_memory_bytes, visible_gpus
from worker.memory_sizes import check_host_memory
from worker.worker_errors import StartupError

_MAX_CONFIG_BYTES = 4 * 2**20


def check_early(options: Options, folder: Path) -> None:
    """Refuse a cache that does not fit, and ranks that cannot share the heads. Raises OptionError."""
    _check_memory(options)
    num_ranks, num_heads = options.tensor_parallel_size, _num_heads(folder)
    if num_heads and num_heads % num_ranks:
        raise OptionError(
            f"--tensor-parallel-size {num_ranks}",
            f"the {num_heads} query heads of this model cannot be divided by {num_ranks}",
            "ask for a number that divides its heads, or leave it out (docs/models.md)",
        )


def _check_memory(options: Options) -> None:
    device = device_of(options)
    if not (device == "cpu" or (device == "auto" and not visible_gpus())):
        return
    try:
        check_host_memory(
            available_memory_bytes(),
            cache_bytes=options.kv_cache_memory or 0,
            swap_bytes=options.swap_space or 0,
        )
    except StartupError as error:
        given = {"--kv-cache-memory": options.kv_cache_memory, "--swap-space": options.swap_space}
        named = " and ".join(name for name, num_bytes in given.items() if num_bytes)
        raise OptionError(named, error.what, error.fix) from error


def _num_heads(folder: Path) -> int | None:
    """Read the number of query heads; None where config.json has none, or cannot be read."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            return None
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        text = content.get("text_config") or content
        num_heads = text.get("num_attention_heads")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return num_heads if type(num_heads) is int and num_heads > 0 else None
