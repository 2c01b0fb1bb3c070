"""What `tokenyard doctor` found out about one thing.

Owns: the words for it, plain enough to cross from the process that may import torch to the one that may not.
"""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # it will be served, but less well than it could be
    FAULT = "fault"  # `tokenyard serve` would refuse, or fail later
    UNKNOWN = "unknown"  # not looked at, because something before is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    topic: str
    """One or two words: `port`, `memory`."""
    verdict: Verdict
    what: str
    """What was found."""
    fix: str = ""
    """What to do about it; empty if it is fine."""
