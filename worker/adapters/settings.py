"""The settings of an adapter, as peft writes them in adapter_config.json.

Owns: the meaning of each key, and the refusal by name of every key that would change the result otherwise.
Never: reads files (files.py).
Source: LoraConfig of peft 0.21 and its matching of target modules; low-rank updates, arXiv:2106.09685.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Generic, TypeVar

from pydantic_core import SchemaValidator

from worker.checkpoint.patterns import Patterns
from worker.worker_errors import AdapterRefused

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_MAX_WORDS = 4096
_MAX_LAYER_WORDS = 16
_MAX_PATTERNS_S = 0.1
"""Processor time for the patterns of an adapter, compiled and asked for each layer: steps wait meanwhile."""
_LAYER = re.compile(r".*\.[^.]*\.(\d+)\.")
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")
_ALL = "all-linear"

# Keys that say where an adapter comes from or how it was trained, and nothing about its result.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout"),
        *("revision", "task_type", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("megatron_config", "megatron_core", "qalora_group_size", "runtime_config", "fan_in_fan_out"),
        *("velora_config", "ensure_weight_tying"),
    }
)
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "bias"),
        *("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "init_lora_weights"),
        *("target_parameters", "peft_version"),
    }
)
# Beginnings that change the base's weights: the update alone would be added to the wrong ones.
_CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

_Value = TypeVar("_Value")


class ByName(Generic[_Value]):
    """Values by words that end a module's name at a dot, or by regular expressions for the whole name."""

    def __init__(self, named: Mapping[str, _Value], key: str, patterns: Patterns) -> None:
        """Raises AdapterRefused for expressions that need more than linear time, or long."""
        self._patterns = patterns
        self._words: dict[str, tuple[int, _Value]] = {}
        self._expressions: list[tuple[int, SchemaValidator, _Value]] = []
        for place, (text, value) in enumerate(named.items()):
            if _WORD.fullmatch(text):
                self._words[text] = place, value
            else:
                expression = patterns.compile(rf"^(?:(?:.*\.)?(?:{text}))$", text, key)
                self._expressions.append((place, expression, value))

    def find(self, name: str, default: _Value) -> _Value:
        """Return the value of the first that matches the name. Raises AdapterRefused."""
        accept = self._patterns.accept
        found = [self._words[end] for end in _ends(name) if end in self._words]
        found += [(place, value) for place, each, value in self._expressions if accept(each, name)]
        return min(found, key=lambda each: each[0])[1] if found else default


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Settings of one adapter, of which every key is known."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    targets: "frozenset[str] | SchemaValidator | None"
    """Words, or one expression for whole names; None: all linear layers."""
    excluded: "frozenset[str] | SchemaValidator"
    parameters: frozenset[str]
    """Names of parameters that are no module's own, such as those of experts."""
    layers: frozenset[int] | None
    layer_words: tuple[str, ...]
    """Names of the lists that the numbers of `layers` count in; none: any list."""
    ranks: ByName[int]
    alphas: ByName[float]
    patterns: Patterns
    peft_version: tuple[int, int] | None
    """First two numbers of the version that wrote it, where it says so."""
    renamed: tuple[str, str] = ("", "")
    """Beginnings of names here and in the adapter, where it was trained on the sister class."""

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's update."""
        return self.ranks.find(self._name_there(module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's update."""
        alpha = self.alphas.find(self._name_there(module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (sqrt(rank) if self.is_rank_stabilized else rank)

    def include(self, module: str) -> bool:
        """Tell whether the adapter is meant to have an update for a module of this name."""
        module = self._name_there(module)
        if self._matches(self.excluded, module):
            return False
        if self.targets is None:
            return True
        if not self._matches(self.targets, module):
            return False
        return self.layers is None or isinstance(self.targets, SchemaValidator) or self._counts(module)

    def name_of(self, module: str) -> str:
        """Return the name that patterns know a layer by: that of its weight, where that is the target."""
        weight = f"{module}.weight"
        return weight if self.include_parameter(weight) else module

    def include_parameter(self, name: str) -> bool:
        """Tell whether a parameter of this name is a target."""
        return self._matches(self.parameters, self._name_there(name))

    def _matches(self, patterns: "frozenset[str] | SchemaValidator", module: str) -> bool:
        if isinstance(patterns, SchemaValidator):
            return self.patterns.accept(patterns, module)
        return not patterns.isdisjoint(_ends(module))

    def _name_there(self, name: str) -> str:
        here, there = self.renamed
        return there + name.removeprefix(here) if name.startswith(here) else name

    def _counts(self, module: str) -> bool:
        found = _LAYER.match(module)
        for word in self.layer_words:
            found = re.match(rf".*\.{re.escape(word)}\.(\d+)\.", module)
            if found is not None:
                break
        return found is not None and self.layers is not None and int(found.group(1)) in self.layers


def read_settings(config: dict[str, Any]) -> AdapterSettings:
    """Check and read the parsed JSON. Raises AdapterRefused, which names the key."""
    if config.get("peft_type") != "LORA":
        raise AdapterRefused(f"peft_type is {config.get('peft_type')!r}, and only LORA is computed")
    for key, value in config.items():
        if key not in _READ and key not in _WITHOUT_EFFECT and value not in (None, False, [], {}):
            raise AdapterRefused(f"{key} is set, which is not computed")
    _refuse_changes_of_the_base(config)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    patterns = Patterns(_refused_pattern, max_s=_MAX_PATTERNS_S)
    return AdapterSettings(
        rank=_rank(rank, "r"),
        alpha=_number(alpha, "lora_alpha"),
        is_rank_stabilized=bool(config.get("use_rslora")),
        targets=None
        if config.get("target_modules") == _ALL
        else _names_or_pattern(_targets(config), "target_modules", patterns),
        excluded=_names_or_pattern(config.get("exclude_modules") or [], "exclude_modules", patterns),
        parameters=_names(config.get("target_parameters") or [], "target_parameters"),
        layers=_layers(config.get("layers_to_transform")),
        layer_words=_layer_words(config.get("layers_pattern")),
        ranks=_by_pattern(config, "rank_pattern", _rank, patterns),
        alphas=_by_pattern(config, "alpha_pattern", _number, patterns),
        patterns=patterns,
        peft_version=_version(config.get("peft_version")),
    )


def _refused_pattern(what: str) -> AdapterRefused:
    return AdapterRefused(f"{what}; list the names of the modules instead")


def _version(value: object) -> tuple[int, int] | None:
    found = _VERSION.match(value) if isinstance(value, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def _refuse_changes_of_the_base(config: dict[str, Any]) -> None:
    if config.get("bias", "none") != "none":
        raise AdapterRefused(f"bias is {config['bias']!r}: trained biases are not computed")
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(_CHANGING_THE_BASE):
        raise AdapterRefused(
            f"init_lora_weights is {begin!r}, which changes the base's weights; convert it to a plain adapter"
        )


def _names_or_pattern(value: object, key: str, patterns: Patterns) -> frozenset[str] | SchemaValidator:
    if isinstance(value, str):
        return patterns.compile(rf"^(?:{value})$", value, key)
    return _names(value, key)


def _names(value: object, key: str) -> frozenset[str]:
    if not isinstance(value, list) or len(value) > _MAX_WORDS:
        raise AdapterRefused(f"{key} is neither a list of names nor a pattern")
    for word in value:
        if not isinstance(word, str) or not _WORD.fullmatch(word):
            raise AdapterRefused(f"{key} holds {str(word)[:80]!r}, which is no name of a module")
    return frozenset(value)


def _targets(config: dict[str, Any]) -> object:
    modules = config.get("target_modules")
    return [] if modules is None and config.get("target_parameters") else modules


def _ends(name: str) -> list[str]:
    """List a name, and what is behind each of its dots."""
    parts = name.split(".")
    return [".".join(parts[place:]) for place in range(len(parts))]


def _by_pattern(
    config: dict[str, Any], key: str, read: Callable[[object, str], _Value], patterns: Patterns
) -> ByName[_Value]:
    """Read a mapping of names and patterns. Raises AdapterRefused."""
    named = config.get(key) or {}
    if not isinstance(named, dict) or len(named) > _MAX_WORDS:
        raise AdapterRefused(f"{key} is not a mapping of names")
    return ByName({text: read(value, key) for text, value in named.items()}, key, patterns)


def _rank(value: object, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**20:
        raise AdapterRefused(f"{key} holds {str(value)[:80]!r}, which is no rank")
    return value


def _number(value: object, key: str) -> float:
    is_bool = isinstance(value, bool)
    if not is_bool and isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return float(value)
    raise AdapterRefused(f"{key} holds {str(value)[:80]!r}, which is no number")


def _layers(value: object) -> frozenset[int] | None:
    numbers = [value] if isinstance(value, int) else value
    if numbers is None or numbers == []:
        return None
    if not isinstance(numbers, list) or not all(isinstance(each, int) for each in numbers):
        raise AdapterRefused("layers_to_transform is no list of numbers")
    return frozenset(numbers)


def _layer_words(value: object) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value or []
    if not isinstance(words, list) or len(words) > _MAX_LAYER_WORDS:
        raise AdapterRefused(f"layers_pattern is no list of up to {_MAX_LAYER_WORDS} names")
    if not all(isinstance(each, str) and _WORD.fullmatch(each) for each in words):
        raise AdapterRefused("layers_pattern holds what is no name of a module")
    return tuple(words)
