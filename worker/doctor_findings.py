"""Findings of `tokenyard doctor`, and the memory that a model needs.

Owns: their fields, which cross as JSON from the process that imports torch to the one that does not.
"""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # it can be served, but not as well as possible
    FAULT = "fault"  # `tokenyard serve` would refuse, or fail later
    UNKNOWN = "unknown"  # not examined, because of an earlier fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A line of the report."""

    topic: str
    """One or two words: `port`, `memory`."""
    verdict: Verdict
    what: str
    """The observation, in one sentence."""
    fix: str = ""
    """Advice to the operator; empty if none is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """The memory of one model on its device, as it is foreseen before the model is loaded."""

    device: str
    """`cpu`, or `cuda:0`; models of one device share its memory."""
    budget_bytes: int
    """Memory of the device for all models together."""
    fixed_bytes: int
    """Weights, and all else but the KV cache."""
    token_bytes: int
    """KV cache of one token; 0 for a model without one, or whose cache is not foreseen."""
    least_bytes: int
    """KV cache for one sequence: of the length that was asked for, or of a modest one."""
    most_bytes: int
    """KV cache that it would have alone."""
