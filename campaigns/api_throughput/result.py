"""The result of one run: how much was offered, how much arrived, how late, and what it cost.

Owns: the arithmetic on what the stand-in sent and the reader read.
Never: measures anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import msgspec

from campaigns.api_throughput.reader import Arrival, Readings

HEADER = (
    "streams   offered delivered  tokens/chunk   delay p50      p99      max   API process\n"
    "         tokens/s  tokens/s                       ms       ms       ms   us/token  cores"
)


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Work that the stand-in did."""

    sent_s: list[float]
    """When it sent each step: with the n-th, the n-th token of every stream. Of time.monotonic."""
    processor_s: float
    """Used by the server's process before the first: by then it had taken in all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of one run."""

    num_streams: int
    offered_per_s: float
    """Tokens that the stand-in sent."""
    delivered_per_s: float
    """Tokens that arrived, from the first step to the last arrival."""
    num_lost: int
    """Tokens that were sent and never arrived."""
    tokens_per_chunk: float
    delays_s: tuple[float, float, float]
    """From the stand-in's send to the reader's receive: median, 99th percentile, greatest."""
    api_s_per_token: float
    """Processor time, both kinds."""
    api_cores: float

    def __str__(self) -> str:
        p50, p99, most = (f"{delay_s * 1e3:8.1f}" for delay_s in self.delays_s)
        return (
            f"{self.num_streams:7d} {self.offered_per_s:9.0f} {self.delivered_per_s:9.0f} "
            f"{self.tokens_per_chunk:13.2f}    {p50} {p99} {most} "
            f"{self.api_s_per_token * 1e6:10.1f} {self.api_cores:6.2f}"
            + (f"  {self.num_lost} LOST" if self.num_lost else "")
        )


def summarize(readings: Readings, steps: Steps, chars_per_token: int) -> Result:
    sent_s = steps.sent_s
    delays = sorted(
        chain.from_iterable(_delays(stream, sent_s, chars_per_token) for stream in readings.streams)
    )
    arrivals = list(chain.from_iterable(readings.streams))
    lasted_s = readings.ended_s - sent_s[0]
    api_s = readings.processor_s - steps.processor_s
    num_streams = len(readings.streams)
    return Result(
        num_streams=num_streams,
        offered_per_s=num_streams * (len(sent_s) - 1) / (sent_s[-1] - sent_s[0]),
        delivered_per_s=len(delays) / lasted_s,
        num_lost=num_streams * len(sent_s) - len(delays),
        tokens_per_chunk=len(delays) / sum(arrival.num_chunks for arrival in arrivals),
        delays_s=(delays[len(delays) // 2], delays[len(delays) * 99 // 100], delays[-1]),
        api_s_per_token=api_s / len(delays),
        api_cores=api_s / lasted_s,
    )


def _delays(stream: list[Arrival], sent_s: list[float], chars_per_token: int) -> Iterator[float]:
    """Delay of each token of one stream."""
    num_tokens = num_chars = 0
    for arrival in stream:
        num_chars += arrival.num_chars
        while (num_tokens + 1) * chars_per_token <= num_chars:
            yield arrival.time_s - sent_s[num_tokens]
            num_tokens += 1
