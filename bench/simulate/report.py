"""Runs side by side: one column each, as plain text for people and as JSON for machines.

Owns: which numbers are shown, and their names.
Never: measures.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.load.report import Distribution
from bench.simulate.run import RunResult
from bench.simulate.tally import ClassTally, Slo, class_name

_LATENCIES = (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2e_ms", "End to end"))
_PERCENTILES = ("p50", "p90", "p99", "max")

_GOODPUT, _GOOD_SHARE, _GOOD_IN_CLASS = "Goodput, requests/s", "  share of requests", "  within the SLO"
_SLO_ROWS = {_GOODPUT, _GOOD_SHARE, _GOOD_IN_CLASS}

Row = tuple[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """The requests of one priority and tenant. A latency is None where there is nothing to measure."""

    priority: int
    tenant: str
    num_arrived: int
    num_rejected: int
    num_completed: int
    num_cut_short: int
    num_good: int
    num_output_tokens: int
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run in numbers."""

    name: str
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    """Requests that kept to the SLO; all that completed where there is none."""
    good_share: float
    """Share of the requests that arrived."""
    num_replicas: int
    """Most at once."""
    mean_replicas: float
    busy_share: float
    mean_kv_use: float
    max_kv_use: float
    num_steps: int
    tokens_per_step: float
    max_waiting: int
    preemptions: dict[str, int]
    recomputed_share: float
    """Share of the computed tokens that sequences had lost before."""
    prefix_hit_share: float
    """Share of the prompt tokens."""
    num_draft_tokens: int
    """Drafts that were verified."""
    accepted_share: float
    """Share of these that were right."""
    classes: tuple[ClassReport, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def report_of(result: RunResult) -> RunReport:
    classes = tuple(_class_report(tally) for tally in result.classes)
    num_completed = sum(each.num_completed for each in classes)
    num_good = sum(each.num_good for each in classes)
    return RunReport(
        name=result.name,
        duration_s=result.duration_s,
        requests_per_s=_share(num_completed, result.duration_s),
        output_tokens_per_s=_share(sum(each.num_output_tokens for each in classes), result.duration_s),
        goodput_per_s=_share(num_good, result.duration_s),
        good_share=_share(num_good, sum(each.num_arrived for each in classes)),
        num_replicas=result.max_replicas,
        mean_replicas=_share(result.replica_s, result.duration_s),
        busy_share=result.busy_share,
        mean_kv_use=result.mean_kv_use,
        max_kv_use=result.max_kv_use,
        num_steps=result.num_steps,
        tokens_per_step=_share(result.num_tokens, result.num_steps),
        max_waiting=max((waiting for _, waiting in result.queue), default=0),
        preemptions=result.preemptions,
        recomputed_share=_share(result.num_recomputed_tokens, result.num_tokens),
        prefix_hit_share=_share(result.num_prefix_hits, result.num_prefix_queries),
        num_draft_tokens=result.num_draft_tokens,
        accepted_share=_share(result.num_accepted_tokens, result.num_draft_tokens),
        classes=classes,
    )


def _class_report(tally: ClassTally) -> ClassReport:
    return ClassReport(
        priority=tally.priority,
        tenant=tally.tenant,
        num_arrived=tally.num_arrived,
        num_rejected=tally.num_rejected,
        num_completed=tally.num_completed,
        num_cut_short=tally.num_cut_short,
        num_good=tally.num_good,
        num_output_tokens=tally.num_output_tokens,
        ttft_ms=tally.ttft_ms(),
        itl_ms=tally.gaps.distribution_ms(),
        e2e_ms=tally.e2e_ms(),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def render(reports: Sequence[RunReport], slo: Slo) -> str:
    """Format a table with a column for each run; the SLO has a row where there is one."""
    words = [each.name.split("+") for each in reports]
    depth = max(len(each) for each in words)
    rows: list[Row] = [
        ("", [each[line] if line < len(each) else "" for each in words]) for line in range(depth)
    ]
    rows += _run_rows(reports)
    for key in sorted({(each.priority, each.tenant) for report in reports for each in report.classes}):
        rows += [("", []), *_class_rows(reports, *key)]
    if not slo.binds:
        rows = [row for row in rows if row[0] not in _SLO_ROWS]
    title_width = max(len(title) for title, _ in rows) + 2
    widths = [max(12, *(len(cells[n]) + 2 for _, cells in rows if cells)) for n in range(len(reports))]
    lines = []
    for title, cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=False)]
        lines.append((title.ljust(title_width) + "".join(padded)).rstrip())
    return "\n".join(lines)


def _run_rows(reports: Sequence[RunReport]) -> list[Row]:
    rows: list[Row] = [
        ("Duration, s", [f"{each.duration_s:.1f}" for each in reports]),
        ("Requests/s", [f"{each.requests_per_s:.2f}" for each in reports]),
        ("Output tokens/s", [f"{each.output_tokens_per_s:.0f}" for each in reports]),
        (_GOODPUT, [f"{each.goodput_per_s:.2f}" for each in reports]),
        (_GOOD_SHARE, [f"{each.good_share:.1%}" for each in reports]),
        ("Replicas, mean", [f"{each.mean_replicas:.2f}" for each in reports]),
        ("Busy", [f"{each.busy_share:.1%}" for each in reports]),
        ("Tokens a step", [f"{each.tokens_per_step:.1f}" for each in reports]),
        ("KV use, mean", [f"{each.mean_kv_use:.1%}" for each in reports]),
        ("KV use, most", [f"{each.max_kv_use:.1%}" for each in reports]),
        ("Waiting, most", [str(each.max_waiting) for each in reports]),
        ("Preemptions", [str(sum(each.preemptions.values())) for each in reports]),
    ]
    for cause in sorted({cause for each in reports for cause in each.preemptions}):
        rows.append((f"  {cause}", [str(each.preemptions.get(cause, 0)) for each in reports]))
    rows.append(("Recomputed tokens", [f"{each.recomputed_share:.1%}" for each in reports]))
    if any(each.prefix_hit_share for each in reports):
        rows.append(("Prefix cache hits", [f"{each.prefix_hit_share:.1%}" for each in reports]))
    if any(each.num_draft_tokens for each in reports):
        rows.append(("Drafts verified", [str(each.num_draft_tokens) for each in reports]))
        rows.append(("  accepted", [f"{each.accepted_share:.1%}" for each in reports]))
    return rows


def _class_rows(reports: Sequence[RunReport], priority: int, tenant: str) -> list[Row]:
    found = [
        next((each for each in report.classes if (each.priority, each.tenant) == (priority, tenant)), None)
        for report in reports
    ]
    rows: list[Row] = [
        (class_name(priority, tenant), []),
        ("  completed", [_count(each, "num_completed") for each in found]),
    ]
    for name, title in (("num_rejected", "  rejected: never fits"), ("num_cut_short", "  cut short")):
        if any(each is not None and getattr(each, name) for each in found):
            rows.append((title, [_count(each, name) for each in found]))
    rows.append(
        (
            _GOOD_IN_CLASS,
            [f"{_share(each.num_good, each.num_arrived):.1%}" if each else "-" for each in found],
        )
    )
    for name, title in _LATENCIES:
        for percentile in _PERCENTILES:
            cells = [_latency(each, name, percentile) for each in found]
            rows.append((f"  {title} {percentile}, ms", cells))
    return rows


def _count(report: ClassReport | None, name: str) -> str:
    return "-" if report is None else str(getattr(report, name))


def _latency(report: ClassReport | None, name: str, percentile: str) -> str:
    values: Distribution | None = None if report is None else getattr(report, name)
    return "-" if values is None else f"{getattr(values, percentile):.1f}"
