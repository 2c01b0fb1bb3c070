"""The options of speculation: one JSON object, spelled as other servers spell it, and a draft model alone.

Owns: the options, the object's keys, their bounds, and the methods that are refused by name.
Never: decides how many drafts a step verifies (scheduler/drafts/draft_rule.py): the numbers are ceilings.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from engine.options.declaration import Group, OptionError, declared
from engine.options.model_options import ModelOptions
from engine.options.values import Text
from worker.worker_config import MAX_DRAFTS, DraftMethod, SpeculationConfig

_FLAG = "--speculative-config"
_MODEL_FLAG = "--speculative-model"
_OFF, _EAGLE = "off", "eagle3"
_METHODS = {
    **{each.value: each for each in (DraftMethod.NGRAM, DraftMethod.SUFFIX, DraftMethod.DRAFT_MODEL)},
    DraftMethod.MTP.value: DraftMethod.MTP,
    _EAGLE: DraftMethod.DRAFT_MODEL,
    _OFF: DraftMethod.PREDICTION,
}
# vLLM's names of heads by their family, which the checkpoint says as well.
_HEADS = frozenset(
    f"{family}_mtp"
    for family in (
        *("deepseek", "ernie", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_ocr", "longcat_flash", "mimo"),
        *("mimo_v2", "nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next", "step3p5"),
    )
)
_LOOKUPS = {"prompt_lookup_min": (1, 16), "prompt_lookup_max": (1, 16)}
_BOUNDS = {"num_speculative_tokens": (1, MAX_DRAFTS), **_LOOKUPS}
_EXAMPLE = '\'{"method": "ngram", "num_speculative_tokens": 8}\''

_scheduler = partial(declared, Group.SCHEDULER)


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(ModelOptions):
    """Options of speculation, with those of the model that they are checked against: a part of Options."""

    speculative_config: str | None = _scheduler(
        Text(metavar="JSON"),
        'Guess tokens from repeated text and verify several in one step: {"method": "ngram"} looks in the '
        'request\'s own text, "suffix" also in recent replies to the same tenant, salt and adapter. Output '
        "stays the same; numbers are ceilings, and no guess is verified that is not expected to save time. "
        '{"method": "draft_model", "model": MODEL} or "eagle3" asks MODEL, see --speculative-model; '
        '{"method": "mtp"} the head that some checkpoints have for it, which one rank on a CPU asks by '
        'itself if they have 1 GiB or more; {"method": "off"} leaves that head out. Not with several stages.',
        open_default="the `prediction` of a request, and the checkpoint's head, are used",
    )
    speculative_model: str | None = _scheduler(
        Text(metavar="MODEL"),
        "Smaller model with the same tokenizer, as --model names one, or head of EAGLE-3, that guesses "
        "tokens for the model to verify. Its weights, and keys and values in every KV block, take memory; it "
        "guesses only where that is expected to save time. Not over ranks of GPUs.",
        open_default="none",
    )


def speculation_config(options: SpeculationOptions, find_model: Callable[[str], Path]) -> SpeculationConfig:
    """Parse and check the options; without them the worker takes a head that it finds. Raises OptionError.

    `find_model` finds a checkpoint's folder by what the operator calls it.
    """
    if options.speculative_config is None and options.speculative_model is None:
        return SpeculationConfig(method=DraftMethod.AUTO)
    asked = {} if options.speculative_config is None else _read(options.speculative_config)
    model = _take_model(options, asked)
    method = asked.pop("method", None if model is None else DraftMethod.DRAFT_MODEL.value)
    if str(method) in _HEADS:
        method = DraftMethod.MTP.value
    if str(method) not in _METHODS:
        _refuse(
            f'"method": {json.dumps(method)} is not supported',
            f"use one of the methods {', '.join(_METHODS)}",
        )
    if (model is not None) != (_METHODS[method] is DraftMethod.DRAFT_MODEL):
        given = "no model is named" if model is None else f"the method {method} asks no model"
        _refuse(given, f'use the method draft_model with a "model", or with {_MODEL_FLAG}')
    _check_numbers(asked, {key: each for key, each in _BOUNDS.items() if _is_read(key, method)})
    if "prompt_lookup_max" in asked:
        asked.setdefault("prompt_lookup_min", min(asked["prompt_lookup_max"], 2))
    elif "prompt_lookup_min" in asked:
        asked["prompt_lookup_max"] = max(asked["prompt_lookup_min"], 5)
    if asked.get("prompt_lookup_min", 0) > asked.get("prompt_lookup_max", 0):
        _refuse("prompt_lookup_min is above prompt_lookup_max", "exchange them")
    if method != _OFF:
        _check_steps(options, has_passes=_METHODS[method] in (DraftMethod.DRAFT_MODEL, DraftMethod.MTP))
    path = "" if model is None else str(find_model(model))
    return SpeculationConfig(method=_METHODS[method], model_path=path, is_eagle=method == _EAGLE, **asked)


def _is_read(key: str, method: str) -> bool:
    """Tell whether a number has a meaning for a method."""
    return method in (DraftMethod.NGRAM, DraftMethod.SUFFIX) or (method != _OFF and key not in _LOOKUPS)


def _take_model(options: SpeculationOptions, asked: dict[str, Any]) -> str | None:
    """Take the draft model out of the object, or from its own option."""
    model = asked.pop("model", None)
    if model is not None and (not isinstance(model, str) or not model):
        _refuse(f'"model": {json.dumps(model)} is not the name of a model', "write a folder or a hub name")
    if model is not None and options.speculative_model is not None:
        _refuse(f'a "model" is in it, and {_MODEL_FLAG} names one', "name the draft model once")
    return options.speculative_model if model is None else model


def _check_numbers(asked: dict[str, Any], bounds: dict[str, tuple[int, int]]) -> None:
    for key, value in asked.items():
        if key not in bounds:
            _refuse(f"the key {key!r} is not known here", f"use {', '.join(('method', 'model', *bounds))}")
        low, high = bounds[key]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            _refuse(f"{key} must be a whole number from {low} to {high}", f"write {_EXAMPLE}, say")


def _check_steps(options: SpeculationOptions, *, has_passes: bool) -> None:
    """Refuse steps that verify no such drafts. The worker refuses models, and GPUs that it finds itself."""
    if options.pipeline_parallel_size > 1:
        raise OptionError(
            f"{_asked_flag(options)} with --pipeline-parallel-size {options.pipeline_parallel_size}",
            "stages verify no drafts yet",
            "use one",
        )
    if has_passes and options.device.startswith("cuda") and options.tensor_parallel_size > 1:
        raise OptionError(
            f"{_asked_flag(options)} with --tensor-parallel-size {options.tensor_parallel_size}",
            "a draft model is not divided over ranks of GPUs yet",
            "use one, or the method ngram or suffix",
        )


def _asked_flag(options: SpeculationOptions) -> str:
    return _MODEL_FLAG if options.speculative_config is None else _FLAG


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
