"""Findings of `tokenyard doctor`.

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
