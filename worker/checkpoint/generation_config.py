"""Generation settings of a checkpoint: default sampling, and the tokens that end a sequence.

Owns: the bounds of generation_config.json, and the choice among the places that name end tokens.
Never: trusts a value of a file: a wrong one would fail every request, so that it is refused at load, by file
and key.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from worker.checkpoint.checkpoint_files import read_json_if_there
from worker.checkpoint.tokenizer_files import end_token_id
from worker.worker_errors import StartupError

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """Bounds that the API sets for the same name: a default must be a value that a request may ask for."""

    kinds: tuple[type, ...]
    """A subclass does not count: true is no number."""
    low: float
    high: float
    said: str

    def hold(self, value: Any) -> bool:
        return type(value) in self.kinds and self.low <= value <= self.high


_NUMBER = (int, float)
_REPETITION_PENALTY = {
    "repetition_penalty": _Bounds(kinds=_NUMBER, low=0.01, high=10, said="a number from 0.01 to 10"),
}
_ONLY_WHEN_SAMPLING = {
    "temperature": _Bounds(kinds=_NUMBER, low=0, high=2, said="a number from 0 to 2"),
    "top_p": _Bounds(kinds=_NUMBER, low=0, high=1, said="a number from 0 to 1"),
    "top_k": _Bounds(kinds=(int,), low=-1, high=_INT32_MAX, said="a whole number; 0 and -1 keep all tokens"),
    "min_p": _Bounds(kinds=_NUMBER, low=0, high=1, said="a number from 0 to 1"),
}


def default_sampling(folder: Path, overrides: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
    """Read the values that the file sets; temperature and truncation only if it says that they apply.

    `overrides` come from the operator, checked, and win. Raises StartupError for a value that a request may
    not have either.
    """
    path = folder / "generation_config.json"
    content = read_json_if_there(path)
    bounds = dict(_REPETITION_PENALTY)
    do_sample = content.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise _refused(path, "do_sample", do_sample, "true or false")
    if do_sample:
        bounds |= _ONLY_WHEN_SAMPLING
    taken = {key: content[key] for key in bounds if content.get(key) is not None}
    for key, value in taken.items():
        if not bounds[key].hold(value):
            raise _refused(path, key, value, bounds[key].said)
    return {**taken, **overrides}


def check_sampling(source: str, values: Mapping[str, Any]) -> None:
    """Refuse names that are no default of sampling, and values out of bounds. Raises StartupError."""
    bounds = _REPETITION_PENALTY | _ONLY_WHEN_SAMPLING
    for key, value in values.items():
        if key not in bounds:
            raise StartupError(
                f"{source} sets {key}, which has no default here", fix=f"use {', '.join(bounds)}"
            )
        if not bounds[key].hold(value):
            raise StartupError(f"{source} sets {key} to {value!r:.40}", fix=f"give {bounds[key].said}")


def eos_token_ids(folder: Path, configs: Iterable[Any], *, vocab_size: int) -> tuple[int, ...]:
    """Merge the end tokens of all places: each may know an end-of-turn token that another lacks.

    `configs` are transformers' configuration objects. Raises StartupError for an id, written in either
    file, that the model cannot sample.
    """
    found: list[int] = []
    for path in (folder / "generation_config.json", folder / "config.json"):
        for value in _as_list(read_json_if_there(path).get("eos_token_id")):
            if not _is_token_id(value, vocab_size):
                said = f"a token id below {vocab_size}, or a list of them"
                raise _refused(path, "eos_token_id", value, said)
            found.append(value)
    for config in configs:
        # Here a value may be the family's default, which names a token of another vocabulary.
        values = _as_list(getattr(config, "eos_token_id", None))
        found += [value for value in values if _is_token_id(value, vocab_size)]
    by_tokenizer = end_token_id(folder)
    if by_tokenizer is not None and by_tokenizer < vocab_size:
        found.append(by_tokenizer)
    return tuple(dict.fromkeys(found))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_token_id(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _refused(path: Path, key: str, value: Any, said: str) -> StartupError:
    shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
    return StartupError(f"{path} has {key} {shown}, which must be {said}", fix=f"correct {key} in that file")
