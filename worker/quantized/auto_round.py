"""auto-round checkpoints: integers in GPTQ's or AWQ's packing, with settings for single modules.

Owns: the names of its packings, and its list of modules that differ (`extra_config`).
Never: its packings of floats, which are compressed-tensors' by another name.
Source: arXiv:2309.05516.
"""

import re
from dataclasses import dataclass
from typing import Any

from pydantic_core import SchemaValidator

from worker.checkpoint.patterns import Patterns
from worker.quantized.awq import AwqRules, read_awq_rules
from worker.quantized.gptq import GptqReader, read_gptq_rules
from worker.quantized.scheme import QuantizationRefused, module_patterns

_FIRST_VERSION, _SECOND_VERSION, _AWQ = "gptq", "gptq_v2", "awq"
_PACKINGS = {
    "auto_round": _SECOND_VERSION,
    "auto_round:gptqmodel": _SECOND_VERSION,
    "auto_round:exllamav2": _SECOND_VERSION,
    "auto_round:gptq": _FIRST_VERSION,
    "auto_round:auto_gptq": _FIRST_VERSION,
    "auto_gptq": _FIRST_VERSION,
    "auto_round:awq": _AWQ,
    "auto_round:auto_awq": _AWQ,
    "auto_awq": _AWQ,
}
"""Layouts by packing_format."""
_DEFAULT_PACKING = "auto_round:gptq"
_PLAIN_BITS = 16
_SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")


@dataclass(frozen=True, slots=True)
class AutoRoundRules:
    reader: GptqReader | AwqRules
    named: dict[str, GptqReader | AwqRules]
    """Modules that differ, by their whole names."""
    patterns: Patterns
    matching: tuple[tuple[SchemaValidator, GptqReader | AwqRules], ...]
    """The same by regular expressions for a part of the name, of which the first counts."""

    def reader_of(self, module: str) -> GptqReader | AwqRules:
        if module in self.named:
            return self.named[module]
        accept = self.patterns.accept
        found = (reader for expression, reader in self.matching if accept(expression, module))
        return next(found, self.reader)


def read_auto_round_rules(config: dict[str, Any]) -> AutoRoundRules:
    """Read the rules of AutoRound from its `quantization_config`. Raises QuantizationRefused."""
    found = {
        name: _reader({**config, **settings}) for name, settings in (config.get("extra_config") or {}).items()
    }
    readers = {name: reader for name, reader in found.items() if reader is not None}
    default = _reader(config)
    if default is None:
        raise QuantizationRefused(
            f"quantization_config of auto-round has {config.get('bits')} bits",
            fix="take a checkpoint of 4 or 8",
        )
    patterns, special = module_patterns(), [name for name in readers if _SPECIAL.search(name)]
    matching = tuple((patterns.compile(name, name, "extra_config"), readers[name]) for name in special)
    return AutoRoundRules(default, readers, patterns, matching)


def _reader(config: dict[str, Any]) -> GptqReader | AwqRules | None:
    """Return None for settings of a plain module."""
    if config.get("bits", 4) >= _PLAIN_BITS:
        return None
    packing = str(config.get("packing_format") or config.get("backend") or _DEFAULT_PACKING)
    kind, layout = config.get("data_type", "int"), _PACKINGS.get(packing.replace("autoround", "auto_round"))
    if layout is None or kind != "int":
        raise QuantizationRefused(
            f"quantization_config of auto-round has packing_format {packing} and data_type {kind}",
            fix=f"take a checkpoint of int in one of {', '.join(_PACKINGS)}",
        )
    known = {"bits": config.get("bits", 4), "group_size": config.get("group_size", 128)}
    if layout == _AWQ:
        return read_awq_rules(known)
    return read_gptq_rules({**known, "sym": config.get("sym", True), "checkpoint_format": layout}).reader
