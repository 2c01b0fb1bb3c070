"""Results of the rounds: for each peer and workload one row, and ratios to ours.

Owns: how rounds are put together. Rates are the median over rounds; latencies are those of all completed
requests of all rounds.
Never: text for people (tables.py).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bench.load.report import Distribution, Latencies, latencies_of, summarize
from bench.load.request_record import RequestRecord
from campaigns.peers.catalogue import OURS
from campaigns.peers.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A server is ready."""

    peer: str
    round: int
    ready_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """Requests that Tokenyard completes per second in the closed loop that shares refer to."""

    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One workload on one server, once."""

    peer: str
    round: int
    workload: Workload
    records: Sequence[RequestRecord]
    last_log: str
    """Last lines that the server wrote; shown where requests failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A peer that gave no figures."""

    peer: str
    round: int
    """0: it was not even started."""
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One peer on one workload, all rounds."""

    peer: str
    workload: str
    num_completed: int
    num_planned: int
    num_output_tokens: int
    """Tokens of completed requests. Fewer than the others' means that it ended replies early."""
    output_tokens_per_s: float
    latencies: Latencies
    ratio_to_ours: float | None
    """Ratio of output tokens per second; above 1 it is faster than Tokenyard. None without ours."""
    first_failure: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Runs that were seen, in order."""

    starts: Sequence[Start]
    measurements: Sequence[Measurement]
    failures: Sequence[Failure]
    saturation: Saturation | None = None

    def ready_s(self, peer: str) -> float | None:
        times = [start.ready_s for start in self.starts if start.peer == peer]
        return median(times) if times else None

    def rows(self, *, per_client: int) -> list[Row]:
        """Results by workload, then by peer, in the order in which they were measured first."""
        places = dict.fromkeys((each.workload.name, each.peer) for each in self.measurements)
        names = dict.fromkeys(workload for workload, _ in places)
        ordered = [(name, peer) for name in names for workload, peer in places if workload == name]
        return [self._row(workload, peer, per_client) for workload, peer in ordered]

    def _row(self, workload: str, peer: str, per_client: int) -> Row:
        runs = self._runs(workload, peer)
        records = [record for run in runs for record in run.records]
        failed = [(record, run) for run in runs for record in run.records if not record.is_completed]
        completed = [record for record in records if record.is_completed]
        rate, ours = self._rate(workload, peer), self._rate(workload, OURS)
        return Row(
            peer=peer,
            workload=workload,
            num_completed=len(completed),
            num_planned=sum(run.workload.num_requests(per_client) for run in runs),
            num_output_tokens=sum(record.num_output_tokens for record in completed),
            output_tokens_per_s=rate,
            latencies=latencies_of(completed),
            ratio_to_ours=rate / ours if ours else None,
            first_failure=_said(*failed[0]) if failed else "",
        )

    def _runs(self, workload: str, peer: str) -> list[Measurement]:
        return [each for each in self.measurements if (each.workload.name, each.peer) == (workload, peer)]

    def _rate(self, workload: str, peer: str) -> float:
        rates = [
            summarize(
                [record for record in run.records if record.is_completed], num_planned=len(run.records)
            ).output_tokens_per_s
            for run in self._runs(workload, peer)
        ]
        return median(rates) if rates else 0.0


def _said(record: RequestRecord, run: Measurement) -> str:
    return f"{record.outcome}: {record.message}; its log: {run.last_log}"


def percentiles(distribution: Distribution | None) -> tuple[float, float] | None:
    """p50 and p99, in milliseconds."""
    return (distribution.p50, distribution.p99) if distribution else None
