"""Limits of latencies that a user would notice, and the requests that keep all of them.

Owns: the metrics that can be limited, the way they are written, goodput.
Never: the run (client.py), or latencies of many requests (report.py).
Source: the option of the same name of vLLM's serving benchmark, which has no `itl`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.load.request_record import RequestRecord


class Metric(StrEnum):
    """Latency of one request that can have a limit."""

    TTFT = "ttft"
    TPOT = "tpot"
    ITL = "itl"  # the longest of the request's chunk gaps
    E2EL = "e2el"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Most that one latency of a request may be, in milliseconds."""

    metric: Metric
    ms: float

    def __str__(self) -> str:
        return f"{self.metric}:{self.ms:g}"

    def is_kept_by(self, record: RequestRecord) -> bool:
        value_s = self._value_s(record)
        return value_s is None or value_s * 1000 <= self.ms

    def _value_s(self, record: RequestRecord) -> float | None:
        if self.metric is Metric.TTFT:
            return math.inf if record.ttft_s is None else record.ttft_s
        if self.metric is Metric.TPOT:
            return record.tpot_s
        if self.metric is Metric.ITL:
            return record.longest_pause_s
        return record.e2e_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Completed requests that kept every limit."""

    limits: str
    num_good: int
    requests_per_s: float


def parse_limits(text: str) -> tuple[Limit, ...]:
    """Read `ttft:500,itl:100`, in milliseconds. Raises ValueError."""
    return tuple(_parse_limit(entry) for entry in text.split(","))


def _parse_limit(entry: str) -> Limit:
    name, _, value = entry.partition(":")
    if name not in list(Metric):
        raise ValueError(f"{name!r} has no limit; there are {', '.join(Metric)}")
    try:
        ms = float(value)
    except ValueError:
        ms = math.nan
    if not (math.isfinite(ms) and ms > 0):
        raise ValueError(f"expected {name}:MS with a positive number of milliseconds, got {entry!r}")
    return Limit(metric=Metric(name), ms=ms)


def goodput_of(completed: Sequence[RequestRecord], limits: Sequence[Limit], *, duration_s: float) -> Goodput:
    """Count the requests among `completed` that kept all limits; the others' rate is no goodput."""
    num_good = sum(all(limit.is_kept_by(each) for limit in limits) for each in completed)
    return Goodput(
        limits=", ".join(map(str, limits)),
        num_good=num_good,
        requests_per_s=num_good / duration_s if duration_s else 0.0,
    )
