"""A step trace in Chrome's trace event format, which Perfetto and chrome://tracing open.

Owns: a row of steps, a row for each sequence, counters, and arrows for preemptions.
Never: the form of the file (reading.py).
Source: the "Trace Event Format" document of the Chromium project.
"""

from collections.abc import Iterator
from typing import Any

from bench.trace.reading import TracedStep

_MICRO = 1e6
_ENGINE, _SEQUENCES, _STEPS = 1, 2, 1


class TraceEvents:
    """Collects steps; `events` are what the file holds."""

    def __init__(self, window: tuple[int, int]) -> None:
        """Take the step numbers of the window, both included."""
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "pid": _ENGINE, "name": "process_name", "args": {"name": "engine"}},
            {"ph": "M", "pid": _SEQUENCES, "name": "process_name", "args": {"name": "sequences"}},
            {"ph": "M", "pid": _ENGINE, "tid": _STEPS, "name": "thread_name", "args": {"name": "steps"}},
        ]
        self._window = window
        self._first_s: float | None = None
        self._num_flows = 0

    def add(self, step: TracedStep) -> None:
        if not self._window[0] <= step.step <= self._window[1]:
            return
        if self._first_s is None:
            self._first_s = step.time_s
        at = (step.time_s - self._first_s) * _MICRO
        self.events += self._of_step(step, at)
        for each in step.preemptions:
            self._num_flows += 1
            flow = {"pid": _SEQUENCES, "name": "preemption", "cat": "preemption", "id": self._num_flows}
            words = {"cause": each.cause, "blocks": each.num_freed_blocks, "swapped": each.was_swapped}
            self.events.append({**flow, "ph": "s", "tid": each.beneficiary, "ts": at})
            self.events.append(
                {**flow, "ph": "f", "bp": "e", "tid": each.sequence_id, "ts": at + 1, "args": words}
            )

    def _of_step(self, step: TracedStep, at: float) -> Iterator[dict[str, Any]]:
        lasts = step.duration_s * _MICRO
        num_prefill = step.num_tokens - step.num_decodes
        kind = "mixed" if num_prefill and step.num_decodes else "prefill" if num_prefill else "decode"
        words = {"step": step.step, "prefill": num_prefill, "decodes": step.num_decodes}
        yield {"ph": "X", "pid": _ENGINE, "tid": _STEPS, "ts": at, "dur": lasts, "name": kind, "args": words}
        lines = {"running": step.num_running, "waiting": step.num_waiting, "swapped": step.num_swapped}
        yield {"ph": "C", "pid": _ENGINE, "ts": at, "name": "sequences", "args": lines}
        yield {
            "ph": "C",
            "pid": _ENGINE,
            "ts": at,
            "name": "KV blocks",
            "args": {"used": step.num_used_blocks},
        }
        new = set(step.new)
        for sequence_id, start, num_tokens in step.shares():
            name = "prefill" if num_tokens > 1 or sequence_id in new else "decode"
            place = {"pid": _SEQUENCES, "tid": sequence_id, "ts": at, "dur": lasts}
            yield {"ph": "X", **place, "name": name, "args": {"position": start, "tokens": num_tokens}}
