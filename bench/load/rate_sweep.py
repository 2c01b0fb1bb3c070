"""Sweep of arrival rates: one open loop after another, and before them the saturation that shares refer to.

Owns: the points of a sweep, their order, the saturation, one table and JSON of all runs.
Never: sends a request (client.py) or measures a run (report.py).
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.load.report import Distribution, Summary
from bench.load.request_record import RequestRecord
from bench.load.workload import WorkloadError

MAX_POINTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One arrival rate, as a number of requests per second or as a share of the saturation."""

    value: float
    is_share: bool

    def __str__(self) -> str:
        return f"{self.value * 100:g}%" if self.is_share else f"{self.value:g}"

    def requests_per_s(self, saturation: float) -> float:
        return self.value * saturation if self.is_share else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOfSweep:
    """One run, measured."""

    records: Sequence[RequestRecord]
    summary: Summary
    is_interrupted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One run and the rate that it was asked for."""

    label: str
    """The point as it was given, or `saturation`."""
    asked_per_s: float | None
    """Rate of the arrivals; None for the closed loop of the saturation."""
    run: RunOfSweep

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "asked_per_s": self.asked_per_s,
            "summary": self.run.summary.to_json(),
            "requests": list(self.run.records),
        }


Send = Callable[[float | None, int], Awaitable[RunOfSweep]]
"""Runs the workload once, at a number of requests per second, or in a closed loop for None; the second is the
place of the run in the sweep, and its prompts are its own."""


def parse_sweep(text: str) -> tuple[SweepPoint, ...]:
    """Read `0.5,2,80%`. Raises ValueError."""
    entries = text.split(",")
    if len(entries) > MAX_POINTS:
        raise ValueError(f"expected at most {MAX_POINTS} rates, got {len(entries)}")
    return tuple(_parse_point(entry) for entry in entries)


def _parse_point(entry: str) -> SweepPoint:
    is_share = entry.endswith("%")
    try:
        value = float(entry.removesuffix("%")) / (100 if is_share else 1)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1e-6):
        raise ValueError(f"expected requests per second, or a share such as 80%, got {entry!r}")
    return SweepPoint(value=value, is_share=is_share)


async def run_sweep(points: Sequence[SweepPoint], send: Send) -> list[SweepRow]:
    """Run every point, in order; Ctrl-C ends the sweep with the run that it ended.

    Raises WorkloadError where a share is asked for and no request completes to find the saturation.
    """
    rows: list[SweepRow] = []
    saturation = math.nan
    if any(point.is_share for point in points):
        run = await send(None, 0)
        rows.append(SweepRow(label="saturation", asked_per_s=None, run=run))
        saturation = run.summary.requests_per_s
        if run.is_interrupted:
            return rows
        if not saturation:
            said = next(iter(run.summary.example_messages.values()), "none was sent")
            raise WorkloadError(f"no saturation: no request completed ({said})")
    for place, point in enumerate(points, start=1):
        asked_per_s = point.requests_per_s(saturation)
        run = await send(asked_per_s, place)
        rows.append(SweepRow(label=str(point), asked_per_s=asked_per_s, run=run))
        if run.is_interrupted:
            break
    return rows


_COLUMNS = (
    *("rate", "asked/s", "done/s", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"),
    *("pause p50", "pause p99", "E2E p99", "good/s", "good", "failed"),
)


def render_sweep(rows: Sequence[SweepRow]) -> str:
    """Format one table of plain text, a line for each run; times in ms."""
    table = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table
    )


def _cells(row: SweepRow) -> tuple[str, ...]:
    summary = row.run.summary
    times, goodput = summary.latencies, summary.goodput
    return (
        row.label,
        "-" if row.asked_per_s is None else f"{row.asked_per_s:.3g}",
        f"{summary.requests_per_s:.3g}",
        f"{summary.output_tokens_per_s:.1f}",
        *(*_pair(times.ttft_ms), *_pair(times.chunk_gap_ms), *_pair(times.pause_ms)),
        _pair(times.e2e_ms)[1],
        "-" if goodput is None else f"{goodput.requests_per_s:.3g}",
        "-" if goodput is None else f"{goodput.num_good}/{summary.num_planned}",
        str(summary.num_planned - summary.num_completed),
    )


def _pair(distribution: Distribution | None) -> tuple[str, str]:
    return (f"{distribution.p50:.1f}", f"{distribution.p99:.1f}") if distribution else ("-", "-")
