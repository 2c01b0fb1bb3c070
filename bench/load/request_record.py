"""The record of one request of a load run.

Owns: the meaning of its times and counts, for all who measure requests.
Never: takes a time (client.py, gpu/clients.py), or adds them up (report.py).
"""

from dataclasses import dataclass

COMPLETED = "completed"
CUT_OFF = "cut off"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Outcome of one request. Times are None where it did not come so far."""

    index: int
    priority: int
    outcome: str
    """`completed`, or the kind of failure: countable, such as `HTTP 429 rate_limit_exceeded`."""
    message: str
    """The failure for a person; empty for a completed one."""
    start_s: float
    """Time of sending, after the start of the run."""
    late_s: float
    """Delay behind the planned arrival; 0 in a closed loop."""
    ttft_s: float | None
    """Time from sending to the first token, with the connection made in between."""
    e2e_s: float
    """Time from sending to the end, with or without success."""
    chunk_gaps_s: tuple[float, ...]
    """Times between chunks that bring tokens."""
    tpot_s: float | None
    """Time per token after those of the first chunk; None if there are none."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str

    @property
    def is_completed(self) -> bool:
        return self.outcome == COMPLETED

    @property
    def longest_pause_s(self) -> float | None:
        """Longest time between two chunks that bring tokens; None with fewer than two."""
        return max(self.chunk_gaps_s, default=None)
