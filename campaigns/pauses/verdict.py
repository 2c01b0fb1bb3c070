"""Whether pauses of a neighbour's stream break the promise that nobody's request makes it wait for long.

Owns: the bounds, and what can be judged at all: on a machine that keeps the stream waiting when it is alone,
nothing. Never: measures (neighbour.py), prints (cli.py).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from campaigns.pauses.neighbour import Pause, Readings

ALONE = "alone"
"""Name of the row in which nobody else asks for anything."""
PROMISED_S = 0.1
"""Longest pause of the server, as docs/security.md has it."""
QUIET_S = 0.05
"""Longest pause of the server in which the stream is still said to be quiet when it is alone."""
_RIGHT_STATUSES = frozenset({"200", "400", "413", "429"})
"""Served, a fault that is named, or too many: what may become of others."""


@dataclass(frozen=True, slots=True)
class Row:
    """One round: the stream, and the number of replies to others by status; 0 for none at all."""

    readings: Readings
    ends: Counter[str]

    @property
    def of_server_s(self) -> float:
        """Longest pause, what the reader itself waited for a core left out."""
        return max((pause.of_server_s for pause in self.readings.pauses), default=0.0)

    def longest(self, num: int | None = None) -> list[Pause]:
        """List the longest pauses, the longest first; all without a number."""
        return sorted(self.readings.pauses, key=lambda pause: -pause.lasted_s)[:num]


def why_not_judged(rows: Mapping[str, Row]) -> str:
    """Explain why these rows prove nothing; empty if they do."""
    if not rows[ALONE].readings.pauses:
        return "alone the stream brought nothing"
    pause_s = rows[ALONE].of_server_s
    if pause_s <= QUIET_S:
        return ""
    return f"alone the stream paused for {pause_s * 1e3:.0f} ms: the machine does other work"


def faults_of(rows: Mapping[str, Row]) -> list[str]:
    """List what breaks a promise, a line for each."""
    faults = []
    for name, row in rows.items():
        if row.of_server_s > PROMISED_S:
            faults.append(
                f"{name}: a pause of {row.of_server_s * 1e3:.0f} ms, more than {PROMISED_S * 1e3:.0f}"
            )
        if not row.readings.pauses:
            faults.append(f"{name}: the stream brought nothing")
        if wrong := {status: num for status, num in row.ends.items() if status not in _RIGHT_STATUSES}:
            faults.append(f"{name}: replies by status {wrong}")
    return faults
