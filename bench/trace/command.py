"""`tokenyard trace`: the scheduler step by step, from the file of `--trace-steps`.

Owns: the command line, the table and the summary.
Never: the form of the file (reading.py) or the picture (timeline.py).

Codes: 0 done, 2 a mistake on the command line or in the file.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from bench.trace.events import TraceEvents
from bench.trace.reading import TracedStep, TraceError, read_trace
from bench.trace.timeline import Timeline
from bench.words import WordParser

_MAX_COLUMNS = 4000
_NAMES_IN_A_CELL = 4


def main(argv: Sequence[str]) -> int:
    """Run `tokenyard trace` with the words behind it. Returns the exit status."""
    try:
        options = build_parser().parse_args(list(argv))
    except SystemExit as parsed:  # argparse has said all there is to say
        return int(parsed.code or 0)
    try:
        _run(options)
    except TraceError as error:
        print(f"tokenyard trace: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    summary, table = TraceSummary(), StepTable(options.steps, max_lines=options.max_lines)
    timeline = Timeline(options.steps, max_columns=_MAX_COLUMNS) if options.svg else None
    events = TraceEvents(options.steps) if options.perfetto else None
    for step in read_trace(options.file):
        summary.add(step)
        table.add(step)
        if timeline is not None:
            timeline.add(step)
        if events is not None:
            events.add(step)
    if not table.num_steps:
        raise TraceError("the trace has no steps with such numbers")
    if timeline is not None:
        timeline.close()
        _write(options.svg, str(timeline.draw(max_rows=options.max_rows)))
        if timeline.num_left_out:
            print(f"the picture lacks the last {timeline.num_left_out} steps", file=sys.stderr)
    if events is not None:
        _write(options.perfetto, json.dumps({"traceEvents": events.events, "displayTimeUnit": "ms"}))
    table.print()
    print(summary)


@dataclass(slots=True)
class TraceSummary:
    """A whole trace in numbers."""

    num_steps: int = 0
    first_s: float = inf
    last_s: float = -inf
    busy_s: float = 0.0
    """Time in steps."""
    num_tokens: int = 0
    num_decodes: int = 0
    num_recomputed_tokens: int = 0
    """Tokens that were computed before, and lost to a preemption since."""
    preemptions: Counter[str] = field(default_factory=Counter)
    """Preemptions by cause and mode."""
    max_waiting: int = 0
    max_kv_use: float = 0.0
    """Share of the blocks."""
    _reached: dict[int, int] = field(default_factory=dict)
    """The furthest position of each sequence."""

    def add(self, step: TracedStep) -> None:
        self.num_steps += 1
        self.first_s = min(self.first_s, step.time_s)
        self.last_s = max(self.last_s, step.time_s + step.duration_s)
        self.busy_s += step.duration_s
        self.num_tokens += step.num_tokens
        self.num_decodes += step.num_decodes
        self.max_waiting = max(self.max_waiting, step.num_waiting)
        self.max_kv_use = max(self.max_kv_use, step.num_used_blocks / step.num_blocks)
        for each in step.preemptions:
            self.preemptions[f"{each.cause}, {'swapped' if each.was_swapped else 'recomputed'}"] += 1
        for sequence_id, start, num_tokens in step.shares():
            known, end = self._reached.get(sequence_id, 0), start + num_tokens
            self.num_recomputed_tokens += max(0, min(end, known) - start)
            self._reached[sequence_id] = max(end, known)

    def __str__(self) -> str:
        duration_s, total = max(self.last_s - self.first_s, 1e-9), self.num_tokens or 1
        lines = [
            f"Steps            {self.num_steps} in {duration_s:.2f} s, "
            f"{self.busy_s / duration_s:.0%} of the time in a step",
            f"Tokens           {self.num_tokens}, {self.num_tokens / self.num_steps:.1f} a step, "
            f"{self.num_decodes / total:.1%} of them decodes",
            f"Recomputed       {self.num_recomputed_tokens} tokens, "
            f"{self.num_recomputed_tokens / total:.1%} of all",
            f"Preemptions      {self.preemptions.total()}",
            *(f"  {count:>6} x {kind}" for kind, count in self.preemptions.most_common()),
            f"Waiting          at most {self.max_waiting}",
            f"KV blocks        at most {self.max_kv_use:.1%} in use",
        ]
        return "\n".join(lines)


class StepTable:
    """The first lines of the steps in a window; the rest is only counted."""

    def __init__(self, window: tuple[int, int], *, max_lines: int) -> None:
        self.num_steps = 0
        """Steps in the window."""
        self._window = window
        self._max_lines = max_lines
        self._lines: list[tuple[str, ...]] = []

    def add(self, step: TracedStep) -> None:
        if self._window[0] <= step.step <= self._window[1]:
            self.num_steps += 1
            if len(self._lines) < self._max_lines:
                self._lines.append(_cells(step))

    def print(self) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for title in ("step", "ms", "tokens", "decodes", "run", "wait", "swapped", "KV"):
            table.add_column(title, justify="right", no_wrap=True)
        for title in ("new", "preempted (for)", "waiting for"):
            table.add_column(title)
        for cells in self._lines:
            table.add_row(*cells)
        console = Console()
        if not console.is_terminal:
            console.width = 160
        console.print(table)
        if left_out := self.num_steps - len(self._lines):
            console.print(f"... {left_out} more steps; --steps FROM:TO shows others, --max-lines more")
        console.print()


def _cells(step: TracedStep) -> tuple[str, ...]:
    preempted = [f"{each.sequence_id} ({each.beneficiary}, {each.cause})" for each in step.preemptions]
    return (
        str(step.step),
        f"{step.duration_s * 1000:.2f}",
        str(step.num_tokens),
        str(step.num_decodes),
        str(step.num_running),
        str(step.num_waiting),
        str(step.num_swapped),
        f"{step.num_used_blocks / step.num_blocks:.0%}",
        _some([str(each) for each in step.new]),
        _some(preempted),
        ", ".join(f"{reason} {count}" for reason, count in step.waiting.items()),
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_IN_A_CELL
    return ", ".join(names[:_NAMES_IN_A_CELL]) + (f", {more} more" if more > 0 else "")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from None


def build_parser() -> argparse.ArgumentParser:
    parser = WordParser(
        prog="tokenyard trace",
        description="Show what the scheduler did, from a file that `tokenyard serve --trace-steps` wrote.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--steps",
        type=_steps,
        default=(0, sys.maxsize),
        metavar="FROM:TO",
        help="only these steps, both ends included, in the table and the picture",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw a timeline, one row a sequence")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a trace that Perfetto and chrome://tracing open"
    )
    parser.add_argument(
        "--max-lines", type=_count, default=50, metavar="N", help="of the table (default %(default)s)"
    )
    parser.add_argument(
        "--max-rows", type=_count, default=200, metavar="N", help="of the picture (default %(default)s)"
    )
    return parser


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not colon or not (first or "0").isdecimal() or not (last or "0").isdecimal():
        raise argparse.ArgumentTypeError(f"expected FROM:TO, as in 100:200, got {text!r}")
    return int(first or 0), int(last or sys.maxsize)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)
