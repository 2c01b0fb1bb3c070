"""A measured run and the same run simulated: the time of requests outside of steps, and the error.

Owns: the fit of the overhead, and the error of the whole model, relative to what was measured.
Never: the step times (fitted_step_time.py).
Source: a measured run is what `tokenyard bench serve --json` writes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec

from bench.load.report import Distribution, distribution_ms
from bench.load.request_record import COMPLETED
from bench.simulate.fitting.fitted_step_time import MOST_FACTORS, LinearStepTime
from bench.simulate.requests.arrivals import ArrivalsError, SimRequest
from bench.simulate.run import RunResult, simulate
from bench.simulate.setup import Overhead, Setup
from bench.simulate.tally import GapCounts

_PERCENTILES = ("p50", "p99")
_NUM_DRAWS = 9
_MOST_LATE_S = 0.25  # of an arrival in the trace, which notes them with its next step
_MOST_TOKENS_OFF = 2  # of a request in the trace, which may have computed one that was thrown away
_LEAST_ALIKE = 0.9  # of the requests of a run in its own trace
_LEAST_SPREAD = 0.5  # of the lengths of prompts, between their halves and relative to the middle


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    outcome: str
    start_s: float
    ttft_s: float | None
    e2e_s: float
    chunk_gaps_s: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    priority: int


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    requests: tuple[_Record, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """One percentile of one latency, in milliseconds."""

    name: str
    percentile: str
    measured: float
    draws: tuple[float, ...]
    """Results of simulations that differ in how steps vary, in order."""
    again: float | None
    """Result of another run of the same load."""

    @property
    def simulated(self) -> float:
        """The middle one of the draws."""
        return self.draws[len(self.draws) // 2]

    @property
    def share(self) -> float:
        return self.simulated / self.measured - 1

    def __str__(self) -> str:
        text = (
            f"{self.name} {self.percentile} {self.measured:.1f} measured, "
            f"{self.simulated:.1f} simulated ({self.share:+.1%})"
        )
        if len(self.draws) > 1:
            text += f", from {self.draws[0]:.1f} to {self.draws[-1]:.1f} by the draw"
        if self.again is not None:
            text += f"; measured again {self.again:.1f} ({self.again / self.measured - 1:+.1%})"
        return text


class MeasuredRun:
    """The completed requests of a run, in the order in which they were sent."""

    def __init__(self, records: Sequence[_Record]) -> None:
        self._records = sorted(records, key=lambda each: each.start_s)
        start_s = self._records[0].start_s
        self.requests = [
            SimRequest(
                arrival_s=each.start_s - start_s,
                prompt_len=each.num_prompt_tokens,
                max_tokens=each.num_output_tokens,
                priority=each.priority,
                prefix_group="shared" if each.num_cached_tokens else "",
                prefix_len=each.num_cached_tokens,
            )
            for each in self._records
        ]

    def origin_s(self, step_time: LinearStepTime) -> float | None:
        """First request's moment by the clock of the trace; None if the trace is not of this run.

        The last arrivals of the trace must stand as far apart as these requests, and be as long. A load that
        is repeated token by token at the same moments is taken for this one.
        """
        num = len(self.requests)
        arrivals_s = step_time.arrivals_s[-num:]
        if len(arrivals_s) < num or not self._are_as_long(step_time.lengths[-num:]):
            return None
        offsets_s = [at_s - each.arrival_s for at_s, each in zip(arrivals_s, self.requests, strict=True)]
        origin_s = median(offsets_s)
        if median(abs(each_s - origin_s) for each_s in offsets_s) >= _MOST_LATE_S:
            return None
        is_cut = len(step_time.moments_s) >= MOST_FACTORS and origin_s < step_time.moments_s[0]
        return None if is_cut else origin_s  # nothing is known of the speed at its begin

    def _are_as_long(self, lengths: Sequence[int]) -> bool:
        """Whether the traced requests have these lengths, in any order: in a burst some overtake others."""
        own = sorted(each.prompt_len + each.max_tokens for each in self.requests)
        pairs = zip(own, sorted(lengths), strict=True)
        num_alike = sum(abs(here - there) <= _MOST_TOKENS_OFF for here, there in pairs)
        return num_alike >= _LEAST_ALIKE * len(own)

    def is_repeated_by(self, other: "MeasuredRun") -> bool:
        """Whether another run had the same requests at the same moments."""
        if len(self.requests) != len(other.requests):
            return False
        return all(
            abs(here.arrival_s - there.arrival_s) < _MOST_LATE_S
            and (here.prompt_len, here.max_tokens) == (there.prompt_len, there.max_tokens)
            for here, there in zip(self.requests, other.requests, strict=True)
        )

    def overhead(self, draws: Iterable[Setup]) -> Overhead:
        """Fit the time outside of steps to the first tokens, which come sooner in simulations without it."""
        pairs: list[tuple[int, float]] = []
        for setup in draws:
            first_s = {
                number: seconds
                for tally in simulate(self.requests, setup).classes
                for number, seconds in zip(tally.first_tokens, tally.ttft_s, strict=True)
            }
            pairs += [
                (each.num_prompt_tokens, each.ttft_s - first_s[number])
                for number, each in enumerate(self._records)
                if each.ttft_s is not None and number in first_s
            ]
        return _line_through(pairs)

    def latencies_ms(self) -> dict[str, Distribution | None]:
        return {
            "TTFT": distribution_ms(each.ttft_s for each in self._records if each.ttft_s is not None),
            "ITL": distribution_ms(gap for each in self._records for gap in each.chunk_gaps_s),
            "End to end": distribution_ms(each.e2e_s for each in self._records),
        }

    def errors(self, results: Iterable[RunResult], again: "MeasuredRun | None") -> list[Error]:
        """Compare with the same requests simulated, and measured again."""
        drawn = [_simulated_ms(result) for result in results]
        repeated = {} if again is None else again.latencies_ms()
        return [
            Error(
                name=name,
                percentile=percentile,
                measured=getattr(measured, percentile),
                draws=tuple(sorted(getattr(each[name], percentile) for each in drawn)),
                again=getattr(repeated.get(name), percentile, None),
            )
            for name, measured in self.latencies_ms().items()
            if measured is not None and all(each[name] is not None for each in drawn)
            for percentile in _PERCENTILES
        ]


def calibrated(setup: Setup, run: MeasuredRun, again: MeasuredRun | None = None) -> tuple[Setup, list[Error]]:
    """Return the setup with the overhead of a measured run, and how far off that run it then is.

    Where the steps were fitted to a trace of that very run, the error is one at the speed that the machine
    had at each moment: how fast a machine is now and then is not what the model is about. How single steps
    vary is drawn several times: near saturation that alone moves a percentile by a fourth.
    """
    beside = replace(setup, step_time=replace(setup.step_time, origin_s=run.origin_s(setup.step_time)))
    num_draws = _NUM_DRAWS if setup.step_time.variation else 1
    draws = [replace(beside, draw=draw) for draw in range(num_draws)]
    overhead = run.overhead(draws)
    results = [simulate(run.requests, replace(each, overhead=overhead)) for each in draws]
    return replace(setup, overhead=overhead), run.errors(results, again)


def read_measured_run(path: Path) -> MeasuredRun:
    """Read a run. Raises ArrivalsError."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=_Run)
    except OSError as error:
        raise ArrivalsError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArrivalsError(f"{path}: not what `tokenyard bench serve --json` writes: {error}") from None
    usable = [each for each in run.requests if each.outcome == COMPLETED and each.num_output_tokens]
    if not usable:
        raise ArrivalsError(f"{path} holds no completed requests")
    return MeasuredRun(usable)


def _simulated_ms(result: RunResult) -> dict[str, Distribution | None]:
    gaps = GapCounts()
    for tally in result.classes:
        gaps.include(tally.gaps.items())
    return {
        "TTFT": _all_ms(each.ttft_s for each in result.classes),
        "ITL": gaps.distribution_ms(),
        "End to end": _all_ms(each.e2e_s for each in result.classes),
    }


def _all_ms(parts: Iterable[Iterable[float]]) -> Distribution | None:
    return distribution_ms(value for part in parts for value in part)


def _line_through(pairs: Sequence[tuple[int, float]]) -> Overhead:
    """Fit a line with no coefficient below 0, by medians, so that some late requests do not bend it.

    The slope is that between the middles of the shorter and of the longer half; prompts of like length tell
    of none.
    """
    ordered = sorted(pairs)
    half = len(ordered) // 2
    slope_s = 0.0
    if half:
        shorter, longer = ordered[:half], ordered[-half:]
        run = median(size for size, _ in longer) - median(size for size, _ in shorter)
        rise_s = median(late for _, late in longer) - median(late for _, late in shorter)
        middle = median(size for size, _ in ordered)
        slope_s = max(rise_s / run, 0.0) if run > _LEAST_SPREAD * middle else 0.0
    base_s = median(late - slope_s * size for size, late in ordered) if ordered else 0.0
    return Overhead(base_s=max(base_s, 0.0), per_prompt_token_s=slope_s)
