"""The value of --speculative-config: one JSON object, spelled as other servers spell it.

Owns: the option, its keys, their bounds, and the methods that are refused by name.
Never: decides how many drafts a step verifies (scheduler/step/draft_choice.py): the numbers are ceilings.
"""

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.options.adapter_options import AdapterOptions
from engine.options.option_declaration import Group, OptionError, declared
from engine.options.option_values import Text
from worker.worker_config import MAX_DRAFTS, DraftMethod, SpeculationConfig

_FLAG = "--speculative-config"
_METHODS = (DraftMethod.NGRAM.value, DraftMethod.SUFFIX.value)
_BOUNDS = {
    "num_speculative_tokens": (1, MAX_DRAFTS),
    "prompt_lookup_min": (1, 16),
    "prompt_lookup_max": (1, 16),
}
_EXAMPLE = '\'{"method": "ngram", "num_speculative_tokens": 8}\''


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions(AdapterOptions):
    """The option itself."""

    speculative_config: str | None = declared(
        Group.SCHEDULER,
        Text(metavar="JSON"),
        'Guess tokens from repeated text and verify several in one step: {"method": "ngram"} looks in the '
        'request\'s own text, "suffix" also in recent replies to the same tenant, salt and adapter. Output '
        "stays the same; numbers are ceilings, and no guess is verified that is not expected to save time. "
        "On CPUs, with one rank.",
        open_default="only the `prediction` of a request is used",
        default=None,
    )


def speculation_config(options: SpeculationOptions) -> SpeculationConfig:
    """Parse and check the option; without it only predictions of requests are drafted. Raises OptionError."""
    if options.speculative_config is None:
        return SpeculationConfig()
    asked = _read(options.speculative_config)
    method = asked.pop("method", None)
    if "model" in asked or method not in _METHODS:
        key, value = ("model", asked["model"]) if "model" in asked else ("method", method)
        _refuse(
            f'"{key}": {json.dumps(value)} is not supported: drafts come from texts, not from a second model',
            f"use one of the methods {', '.join(_METHODS)}",
        )
    for key, value in asked.items():
        if key not in _BOUNDS:
            _refuse(f"the key {key!r} is not known", f"use method, {', '.join(_BOUNDS)}")
        low, high = _BOUNDS[key]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            _refuse(f"{key} must be a whole number from {low} to {high}", f"write {_EXAMPLE}, say")
    if "prompt_lookup_max" in asked:
        asked.setdefault("prompt_lookup_min", min(asked["prompt_lookup_max"], 2))
    elif "prompt_lookup_min" in asked:
        asked["prompt_lookup_max"] = max(asked["prompt_lookup_min"], 5)
    config = SpeculationConfig(method=DraftMethod(method), **asked)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        _refuse("prompt_lookup_min is above prompt_lookup_max", "exchange them")
    _check_steps(options)
    return config


def _check_steps(options: SpeculationOptions) -> None:
    """Refuse steps that verify no drafts. The worker refuses a GPU that it finds by itself, and models."""
    for key, value in (
        ("--tensor-parallel-size", options.tensor_parallel_size),
        ("--pipeline-parallel-size", options.pipeline_parallel_size),
    ):
        if value > 1:
            raise OptionError(f"{_FLAG} with {key} {value}", "ranks verify no drafts yet", "use one")
    if options.device.startswith("cuda"):
        raise OptionError(
            f"{_FLAG} with --device {options.device}",
            "the steps of a GPU verify no drafts yet",
            "use --device cpu, or leave it out",
        )


def _read(text: str) -> dict[str, Any]:
    try:
        asked = json.loads(text)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        _refuse("it is not a JSON object", f"write {_EXAMPLE}, say")
    return asked


def _refuse(why: str, fix: str) -> NoReturn:
    raise OptionError(_FLAG, why, fix)
