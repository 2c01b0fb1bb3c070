"""The report of a load run: rates and percentiles, as a table for people and as JSON for machines.

Owns: the statistics and their meaning.
Never: a clock or the network.

Latencies are those of completed requests alone; a failed one counts as failed, and its tokens only where
a field says so.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.load.goodput import Goodput, Limit, goodput_of
from bench.load.request_record import RequestRecord

_TITLES = (
    ("ttft_ms", "TTFT", "to the first token, connection included"),
    ("tpot_ms", "TPOT", "per output token after the first chunk"),
    ("chunk_gap_ms", "ITL", "between chunks that bring tokens"),
    ("pause_ms", "Pause", "longest between two chunks of a request"),
    ("e2e_ms", "End to end", "to the end of the stream"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Mean and percentiles of one latency, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Latencies of a group of completed requests. None where there is nothing to measure."""

    num_requests: int
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    chunk_gap_ms: Distribution | None
    pause_ms: Distribution | None
    """The longest chunk gap of each request: one value a request."""
    e2e_ms: Distribution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run in numbers."""

    duration_s: float
    """Time from the first request sent to the end of the last."""
    num_planned: int
    num_sent: int
    num_completed: int
    num_failed: int
    failures: dict[str, int]
    """Counts by kind, most frequent first."""
    example_messages: dict[str, str]
    """The message of the first failure of each kind."""
    finish_reasons: dict[str, int]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were found in the server's prefix cache."""
    num_output_tokens: int
    """Tokens that arrived, also of failed requests: the server computed them."""
    requests_per_s: float
    """Completed requests."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt tokens of completed requests, and output tokens."""
    tokens_per_chunk: float
    max_late_ms: float
    """The most that an open loop fell behind its own arrivals; large means that the client was too slow."""
    goodput: Goodput | None
    """Requests within the limits; None where no limits were given."""
    latencies: Latencies
    by_priority: dict[int, Latencies]
    """Latencies by priority, where there is more than one priority."""

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        document["by_priority"] = {str(value): each for value, each in document["by_priority"].items()}
        return document


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of ascending values, with linear interpolation between neighbours, as numpy's default."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution_ms(values_s: Iterable[float]) -> Distribution | None:
    ordered = sorted(value * 1000 for value in values_s)
    if not ordered:
        return None
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def latencies_of(completed: Sequence[RequestRecord]) -> Latencies:
    return Latencies(
        num_requests=len(completed),
        ttft_ms=distribution_ms(each.ttft_s for each in completed if each.ttft_s is not None),
        tpot_ms=distribution_ms(each.tpot_s for each in completed if each.tpot_s is not None),
        chunk_gap_ms=distribution_ms(gap for each in completed for gap in each.chunk_gaps_s),
        pause_ms=distribution_ms(
            each.longest_pause_s for each in completed if each.longest_pause_s is not None
        ),
        e2e_ms=distribution_ms(each.e2e_s for each in completed),
    )


def summarize(records: Sequence[RequestRecord], *, num_planned: int, limits: Sequence[Limit] = ()) -> Summary:
    """Add up the records of one run; `limits` are those of its goodput."""
    completed = [each for each in records if each.is_completed]
    failed = [each for each in records if not each.is_completed]
    start_s = min((each.start_s for each in records), default=0.0)
    duration_s = max((each.start_s + each.e2e_s for each in records), default=0.0) - start_s
    num_prompt_tokens = sum(each.num_prompt_tokens for each in completed)
    num_output_tokens = sum(each.num_output_tokens for each in records)
    num_chunks = sum(len(each.chunk_gaps_s) + (each.ttft_s is not None) for each in records)
    priorities = sorted({each.priority for each in records})
    return Summary(
        duration_s=duration_s,
        num_planned=num_planned,
        num_sent=len(records),
        num_completed=len(completed),
        num_failed=len(failed),
        failures=dict(Counter(each.outcome for each in failed).most_common()),
        example_messages={each.outcome: each.message for each in reversed(failed)},
        finish_reasons=dict(Counter(each.finish_reason for each in completed).most_common()),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=sum(each.num_cached_tokens for each in completed),
        num_output_tokens=num_output_tokens,
        requests_per_s=_rate(len(completed), duration_s),
        output_tokens_per_s=_rate(num_output_tokens, duration_s),
        total_tokens_per_s=_rate(num_prompt_tokens + num_output_tokens, duration_s),
        tokens_per_chunk=_rate(num_output_tokens, num_chunks),
        max_late_ms=max((each.late_s * 1000 for each in records), default=0.0),
        goodput=goodput_of(completed, limits, duration_s=duration_s) if limits else None,
        latencies=latencies_of(completed),
        by_priority={
            value: latencies_of([each for each in completed if each.priority == value])
            for value in (priorities if len(priorities) > 1 else ())
        },
    )


def _rate(count: float, per: float) -> float:
    return count / per if per else 0.0


def render(summary: Summary) -> str:
    """Format the summary as a table of plain text."""
    lines = [
        f"Completed        {summary.num_completed} of {summary.num_planned} requests "
        f"in {summary.duration_s:.2f} s",
        f"Failed           {summary.num_failed}",
    ]
    lines += [
        f"  {count:>6} x {kind}: {summary.example_messages[kind]}" for kind, count in summary.failures.items()
    ]
    if summary.num_sent < summary.num_planned:
        lines.append(f"Not sent         {summary.num_planned - summary.num_sent}")
    lines += [
        f"Throughput       {summary.requests_per_s:.2f} requests/s, "
        f"{summary.output_tokens_per_s:.1f} output tokens/s, {summary.total_tokens_per_s:.1f} with prompts",
        f"Tokens           {summary.num_prompt_tokens} prompt ({summary.num_cached_tokens} cached), "
        f"{summary.num_output_tokens} output, {summary.tokens_per_chunk:.2f} a chunk",
    ]
    goodput = summary.goodput
    if goodput is not None:
        lines.append(
            f"Goodput          {goodput.requests_per_s:.2f} requests/s: {goodput.num_good} of "
            f"{summary.num_planned} requests within {goodput.limits}"
        )
    if summary.max_late_ms > 0:
        lines.append(f"Client           sent at most {summary.max_late_ms:.1f} ms late")
    lines += ["", *_latency_table(summary.latencies)]
    for value, latencies in summary.by_priority.items():
        lines += ["", f"Priority {value} ({latencies.num_requests} completed)", *_latency_table(latencies)]
    return "\n".join(lines)


def _latency_table(latencies: Latencies) -> list[str]:
    lines = [f"{'ms':<12}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}{'max':>10}"]
    for name, title, meaning in _TITLES:
        values: Distribution | None = getattr(latencies, name)
        if values is None:
            lines.append(f"{title:<12}{'-':>10}{'':>40}  {meaning}")
            continue
        numbers = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
        lines.append(f"{title:<12}{''.join(f'{number:>10.2f}' for number in numbers)}  {meaning}")
    return lines
