"""The comparison for people, in Markdown.

Owns: words and layout.
Never: the numbers (results.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.load.report import Distribution
from campaigns.peers.results import Results, Row, percentiles
from campaigns.peers.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Machine and servers of a measurement."""

    date: str
    machine: str
    model: str
    num_rounds: int
    per_client: int
    bandwidth: float
    """Bytes per second."""
    floors: Mapping[str, float]
    """Output tokens per second that reading weights and KV cache allows, by workload in a closed loop."""
    floor_steps_s: Mapping[str, float]
    """Seconds of a step that does nothing but read, by workload."""
    versions: Mapping[str, str]


def markdown(setting: Setting, workloads: Sequence[Workload], results: Results, rows: Sequence[Row]) -> str:
    parts = [
        f"{setting.date}, {setting.machine}, memory read at {setting.bandwidth / 1e9:.1f} GB/s. "
        f"Checkpoint {setting.model}, bfloat16. {setting.num_rounds} rounds, {setting.per_client} requests "
        "of each client in each. Times in ms; ratios are output tokens per second over Tokenyard's.",
    ]
    for workload in workloads:
        of_workload = [row for row in rows if row.workload == workload.name]
        if of_workload:
            parts.append(_workload_table(workload, setting, results, of_workload))
    parts.append(_start_table(setting, results))
    if results.failures:
        lines = [
            f"- {each.peer}{f', round {each.round}' if each.round else ''}: {each.what}"
            for each in results.failures
        ]
        parts.append("Without figures:\n\n" + "\n".join(lines))
    failed = [f"- {row.peer}, {row.workload}: {row.first_failure}" for row in rows if row.first_failure]
    if failed:
        parts.append("Failed requests, the first of each:\n\n" + "\n".join(failed))
    return "\n\n".join(parts) + "\n"


def _workload_table(workload: Workload, setting: Setting, results: Results, rows: Sequence[Row]) -> str:
    arrivals = ""
    if workload.share is not None and results.saturation is not None:
        saturation = results.saturation.requests_per_s
        arrivals = f", {workload.share * saturation:.2f} requests/s of {saturation:.2f}"
    lines = [
        f"**{workload.title}** (`{workload.name}`{arrivals})",
        "",
        "| Server | Output tokens/s | Ratio | TTFT p50, p99 | ITL p50, p99 | Longest pause p50, p99 "
        "| E2E p50, p99 | Completed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = row.latencies
        # Where requests arrive by themselves, no server can give more tokens than are asked for.
        ratio = "-" if row.ratio_to_ours is None or workload.share is not None else f"{row.ratio_to_ours:.2f}"
        lines.append(
            f"| {row.peer} | {row.output_tokens_per_s:.1f} | {ratio} | {_pair(times.ttft_ms)} "
            f"| {_pair(times.chunk_gap_ms)} | {_pair(times.pause_ms)} | {_pair(times.e2e_ms)} "
            f"| {row.num_completed} of {row.num_planned}, {row.num_output_tokens} tokens |"
        )
    if workload.share is None:
        floor, floor_ms = setting.floors[workload.name], setting.floor_steps_s[workload.name] * 1e3
        lines.append(f"| floor: bytes over bandwidth | {floor:.1f} | | | {floor_ms:.1f} | | | |")
    return "\n".join(lines)


def _start_table(setting: Setting, results: Results) -> str:
    lines = ["| Server | Version | From its start to ready, s |", "|---|---|---|"]
    for peer in dict.fromkeys(start.peer for start in results.starts):
        ready_s = results.ready_s(peer)
        lines.append(f"| {peer} | {setting.versions.get(peer) or 'unknown'} | {ready_s:.1f} |")
    return "\n".join(lines)


def _pair(distribution: Distribution | None) -> str:
    pair = percentiles(distribution)
    return f"{pair[0]:.1f}, {pair[1]:.1f}" if pair else "-"
