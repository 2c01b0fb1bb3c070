"""Step time fitted to a trace: t = base + token * tokens + decode * decodes + context * context tokens.

Owns: the model and its fit to the steps of a real engine.
Never: a clock.

Context tokens are the keys that attention reads: for each share the position after its last token. The
base is reading the weights and starting the step, `per_token` the arithmetic, `per_decode` what each
sequence costs besides (sampling, bookkeeping), `per_context_token` reading the KV cache. Where weights take
longer to read than to multiply, the token of a decode costs less than one of a prompt, and `per_decode` is
below 0; together with `per_token` it never is. Steps vary about
that as those of the trace did, drawn from a seed: the slowest of them make the tails of latencies.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from math import sqrt
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.trace.reading import TracedStep

Floats = NDArray[np.floating[Any]]

# A step that took this many times what the model says (the first one, which compiles; a machine that slept)
# is an accident and not what the model is about.
_ACCIDENT = 10.0
_NUM_ROUNDS = 4
# Longer than this is no pause between two steps: the engine waited, or did something else.
_MOST_TIMES, _MOST_PAUSE_S = 1.5, 0.005
_MIN_STEPS = 8
MOST_FACTORS = 20_000
"""Steps whose factors are kept: the last ones of the trace."""
_STRETCH_STEPS = 100
_LEAST_OF_A_KIND = 30
_SPEED_WINDOW_S = 4.0
"""Time about a step in which the median factor is the machine's speed. What ends sooner than half of it, as a
batch of unusual shape does, is no speed."""
_SPEED_STEPS = 9
"""Steps of a rare kind that the time is to have on an average: it is longer for these."""


class FitError(Exception):
    """The trace says too little about step times; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepTime:
    """Coefficients of the step time, in seconds."""

    base_s: float
    per_token_s: float
    per_decode_s: float
    per_context_token_s: float
    hidden_s: float = 0.0
    """Part of the arithmetic of tokens that is done while weights are read, which the base has."""
    variation: tuple[float, ...] = ()
    """Factors by which steps took more or less than that, one after the other; none: they did not."""
    computing_shares: tuple[float, ...] = ()
    """Part of each of these in which the model computed; the scheduler learns from that alone, as in the
    server. None: all of it."""
    sizes_s: tuple[float, ...] = ()
    """Length of each of these steps by the line; none: they are all of a kind."""
    moments_s: tuple[float, ...] = ()
    """When each of these steps began, by the clock of the trace."""
    arrivals_s: tuple[float, ...] = ()
    """When requests came, by that clock."""
    lengths: tuple[int, ...] = ()
    """Tokens of each of these requests, its prompt and its reply."""
    origin_s: float | None = None
    """Begin of the simulation by that clock: then steps are as slow or fast as the machine was at that time.
    None: that is drawn too."""

    def seconds(self, num_tokens: int, num_decodes: int, num_context_tokens: int) -> float:
        return (
            self.base_s
            + max(self.per_token_s * num_tokens - self.hidden_s, 0.0)
            + self.per_decode_s * num_decodes
            + self.per_context_token_s * num_context_tokens
        )

    def decode_steps(self, num_decodes: int, num_context_tokens: int, num_steps: int) -> Iterator[float]:
        """Yield what `seconds` returns for steps of the same decodes, one token later each time."""
        beside_context_s = self.seconds(num_decodes, num_decodes, 0)
        for step in range(num_steps):
            yield beside_context_s + self.per_context_token_s * (num_context_tokens + step * num_decodes)

    def __str__(self) -> str:
        return (
            f"{self.base_s * 1e3:.4g} ms + {self.per_token_s * 1e6:.4g} us a token "
            f"{'+' if self.per_decode_s >= 0 else '-'} {abs(self.per_decode_s) * 1e6:.4g} us a decode "
            f"+ {self.per_context_token_s * 1e9:.4g} ns a context token"
        )


class Durations(NamedTuple):
    """Steps one after the other: what each takes, and the part of it in which the model computes."""

    total_s: list[float]
    computing_s: list[float]

    def first(self, num_steps: int) -> "Durations":
        return Durations(self.total_s[:num_steps], self.computing_s[:num_steps])


class _Speed(NamedTuple):
    """Speed of a kind of steps: by which factor they took longer than the line says, over time."""

    moments_s: list[float]
    factors: list[float]

    def at(self, now_s: float) -> float:
        return self.factors[max(bisect_right(self.moments_s, now_s) - 1, 0)]


class _TracedSteps:
    """Steps of a trace by their kind, from which all replicas draw."""

    def __init__(self, model: LinearStepTime) -> None:
        self.factors = list(model.variation)
        self.shares = model.computing_shares or (1.0,) * len(self.factors)
        self.bounds_s = _bounds(model.sizes_s)
        kinds = [self.kind(size_s) for size_s in model.sizes_s] or [0] * len(self.factors)
        self.places: list[list[int]] = [[] for _ in range(len(self.bounds_s) + 1)]
        for place, kind in enumerate(kinds):
            self.places[kind].append(place)
        self.speeds: list[_Speed] = []
        """Speeds by kind; none where nothing is known of the time of the trace."""
        if model.origin_s is not None and self.factors:
            self._tell_speed_from_variation(model, model.origin_s)

    def kind(self, size_s: float) -> int:
        """Kind of a step of which the line says this."""
        return bisect_right(self.bounds_s, size_s)

    def _tell_speed_from_variation(self, model: LinearStepTime, origin_s: float) -> None:
        """Divide factors by the speed of their kind.

        Kinds have speeds of their own: where memory is slow for a while, short steps wait for weights, and
        long ones compute as before.
        """
        for places in self.places:
            moments_s = [model.moments_s[place] for place in places]
            window_s = _SPEED_WINDOW_S
            if len(self.places) > 1:
                window_s = max(window_s, _SPEED_STEPS * (moments_s[-1] - moments_s[0]) / len(places))
            speeds = running_medians(moments_s, [self.factors[place] for place in places], window_s)
            self.speeds.append(_Speed([moment_s - origin_s for moment_s in moments_s], speeds))
            for place, speed in zip(places, speeds, strict=True):
                self.factors[place] /= speed


class StepVariation:
    """Durations of one step after the other, given back where a leap was cut short.

    Each stretch of the trace is as likely as any other, by a seed, and is played as it was: a machine that is
    slow in one step is often slow in the next. A step is as slow as the next one in the trace of about its
    size: what makes a step of 10 ms take 30 adds as much to one of 200, and is a small part of it.
    """

    def __init__(self, steps: _TracedSteps, seed: int) -> None:
        self._steps = steps
        self._random = Random(seed)
        self._starts: list[int] = []  # of stretches, as they were drawn
        self._at = (0, 0, 0)  # stretches begun, steps left of the last one, and its next place
        self._before: list[tuple[int, int, int]] = []  # the same before each of the latest steps

    def vary(self, steps_s: Iterable[float], now_s: float) -> Durations:  # noqa: ARG002 - as TracedVariation
        """Return what the next steps take."""
        steps = list(steps_s)
        factors, shares = self._steps.factors, self._steps.shares
        if not factors:
            return Durations(steps, steps)
        self._before.clear()
        places = [self._next(seconds) for seconds in steps]
        total_s = [seconds * factors[place] for seconds, place in zip(steps, places, strict=True)]
        return Durations(
            total_s, [seconds * shares[place] for seconds, place in zip(total_s, places, strict=True)]
        )

    def _next(self, size_s: float) -> int:
        """Place in the trace of the step that comes next for one of this size."""
        self._before.append(self._at)
        num_begun, num_left, place = self._at
        places = self._steps.places[self._steps.kind(size_s)]
        index = bisect_left(places, place) if num_left else len(places)
        if index == len(places):
            if num_begun == len(self._starts):
                self._starts.append(self._random.randrange(len(self._steps.factors)))
            num_begun, num_left = num_begun + 1, _STRETCH_STEPS
            index = bisect_left(places, self._starts[num_begun - 1]) % len(places)
        self._at = (num_begun, num_left - 1, places[index] + 1)
        return places[index]

    def give_back(self, num_steps: int) -> None:
        """Take back the last of the latest steps."""
        if self._before and num_steps:
            self._at = self._before[-num_steps]


class TracedVariation:
    """Durations at the speed that the machine had at the same time; how single steps vary about it is drawn.

    A factor of one step says how far the model is off as well as how fast the machine was. Next to much the
    same batch at the same time it would hide the error of the model. The median over some seconds of steps
    of its kind hides only an error that lasts as long.
    """

    def __init__(self, steps: _TracedSteps, seed: int) -> None:
        self._steps = steps
        self._single = StepVariation(steps, seed)

    def vary(self, steps_s: Iterable[float], now_s: float) -> Durations:
        """Return what steps take, one after the other from now on."""
        durations = Durations([], [])
        sizes_s = list(steps_s)
        for size_s, seconds, computing_s in zip(sizes_s, *self._single.vary(sizes_s, now_s), strict=True):
            speed = self._steps.speeds[self._steps.kind(size_s)].at(now_s)
            durations.total_s.append(seconds * speed)
            durations.computing_s.append(computing_s * speed)
            now_s += seconds * speed
        return durations

    def give_back(self, num_steps: int) -> None:
        """See StepVariation; the speed depends on the time alone."""
        self._single.give_back(num_steps)


def _bounds(sizes_s: Sequence[float]) -> list[float]:
    """Sizes at which steps of another kind begin: at least twice as long, and enough of them to draw from."""
    bounds_s: list[float] = []
    ordered = sorted(sizes_s)
    begin = 0
    for place, size_s in enumerate(ordered):
        is_larger = size_s >= 2 * ordered[begin]
        if is_larger and place - begin >= _LEAST_OF_A_KIND <= len(ordered) - place:
            bounds_s.append(sqrt(ordered[place - 1] * size_s))
            begin = place
    return bounds_s


def running_medians(
    moments_s: Sequence[float], values: Sequence[float], window_s: float = _SPEED_WINDOW_S
) -> list[float]:
    """Return for each moment the median of the values about it, so that what lasts keeps its edges."""
    medians, window = [], list[float]()
    begin = end = 0
    for now_s in moments_s:
        while end < len(values) and moments_s[end] <= now_s + window_s / 2:
            insort(window, values[end])
            end += 1
        while moments_s[begin] < now_s - window_s / 2:
            window.pop(bisect_left(window, values[begin]))
            begin += 1
        medians.append(window[len(window) // 2])
    return medians


_steps_of = lru_cache(maxsize=2)(_TracedSteps)


def variation_of(model: LinearStepTime, seed: int) -> StepVariation | TracedVariation:
    steps = _steps_of(model)
    return TracedVariation(steps, seed) if steps.speeds else StepVariation(steps, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStepTime:
    """A step time, and how well it agrees with the trace."""

    model: LinearStepTime
    num_steps: int
    num_accidents: int
    """Steps that were left out: they took far longer or shorter than steps of their size."""
    median_error: float
    """Error of the predicted step time, relative to the measured one."""

    def __str__(self) -> str:
        return (
            f"{self.model}, fitted to {self.num_steps} steps ({self.num_accidents} left out); "
            f"the median step is off by {self.median_error:.1%}"
        )


def fit(steps: Iterable[TracedStep]) -> FittedStepTime:
    """Least squares of the relative error; nothing in a step takes less than no time. Raises FitError.

    Relative, because a step of 5 ms matters as much to those who wait for its tokens as one of 500 ms.
    Steps that copied blocks from or to the host are left out: the cost of a copy is a setting.
    """
    traced = list(steps)
    rows = [
        (
            step.time_s,
            step.execute_s,
            1.0,
            step.num_tokens - step.num_decodes,
            step.num_decodes,
            step.num_context_tokens,
            seconds,
        )
        for step, seconds in _with_pauses(traced)
        if step.duration_s > 0 and step.num_tokens > 0 and not step.num_swapped_blocks
    ]
    if len(rows) < _MIN_STEPS:
        raise FitError(f"a fit needs at least {_MIN_STEPS} steps that took time, and there are {len(rows)}")
    table: Floats = np.array(rows)
    moments_s, computing_s, sizes, measured_s = table[:, 0], table[:, 1], table[:, 2:-1], table[:, -1]
    found, is_kept = _without_accidents(sizes, measured_s)
    predicted_s: Floats = sizes[is_kept] @ found
    errors = np.abs(predicted_s / measured_s[is_kept] - 1)
    variation: Floats = (measured_s[is_kept] / predicted_s)[-MOST_FACTORS:]
    base, token, decode, context = (float(each) for each in found)  # a token of a prompt, or of a decode
    shares: Floats = np.minimum((computing_s / measured_s)[is_kept][-MOST_FACTORS:], 1.0)
    return FittedStepTime(
        model=LinearStepTime(
            base_s=base,
            per_token_s=token,
            per_decode_s=decode - token,
            per_context_token_s=context,
            variation=tuple(variation.tolist()),
            computing_shares=tuple(shares.tolist()),
            sizes_s=tuple(predicted_s[-MOST_FACTORS:].tolist()),
            moments_s=tuple(moments_s[is_kept][-MOST_FACTORS:].tolist()),
            arrivals_s=tuple(step.time_s for step in traced for _ in step.arrived),
            lengths=_lengths(traced),
        ),
        num_steps=int(is_kept.sum()),
        num_accidents=int((~is_kept).sum()),
        median_error=float(np.median(errors)),
    )


def _without_accidents(sizes: Floats, measured_s: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Coefficients, and which steps are no accidents."""
    # Relative to the measured time at first: long accidents then count for little, but so do all steps
    # that are longer than usual. So from then on relative to the predicted time, without the accidents.
    found = _non_negative(sizes, measured_s, measured_s)
    for _ in range(_NUM_ROUNDS):
        predicted_s: Floats = sizes @ found
        is_kept = (measured_s < _ACCIDENT * predicted_s) & (predicted_s < _ACCIDENT * measured_s)
        found = _non_negative(sizes[is_kept], measured_s[is_kept], predicted_s[is_kept])
    # Of tokens of prompts, or of decodes, that the trace has not, only the others tell.
    if not sizes[:, 1:3].any(axis=0).all():
        found[1:3] = found[1:3].max()
    return found, is_kept


def _lengths(steps: Iterable[TracedStep]) -> tuple[int, ...]:
    """Tokens of the sequences that came, in that order: the last one of a reply is not computed any more."""
    arrived: list[int] = []
    last: dict[int, int] = {}
    for step in steps:
        arrived += step.arrived
        last.update((sequence_id, start + num - 1) for sequence_id, start, num in step.chunks)
        last.update(step.decodes)
    return tuple(last.get(sequence_id, -2) + 2 for sequence_id in arrived)


def _with_pauses(steps: Iterable[TracedStep]) -> Iterator[tuple[TracedStep, float]]:
    """Steps with what they took, and what the engine did until it planned the next, while it had work."""
    for step, following in pairwise(chain(steps, [None])):
        assert step is not None
        seconds = step.duration_s
        if following is not None and step.num_running + step.num_waiting:
            period_s = following.time_s - step.time_s
            if seconds < period_s < _MOST_TIMES * seconds + _MOST_PAUSE_S:
                seconds = period_s
        yield step, seconds


def _non_negative(sizes: Floats, measured_s: Floats, unit_s: Floats) -> Floats:
    """Least squares of errors in units of `unit_s`, one a step.

    While a coefficient is below 0, the lowest is set to 0 and the rest fitted again.
    """
    scales = np.maximum(sizes.max(axis=0), 1e-12)
    rows = sizes / scales / unit_s[:, None]
    free = list(range(sizes.shape[1]))
    found = np.zeros(sizes.shape[1])
    while free:
        solved: Floats = np.linalg.lstsq(rows[:, free], measured_s / unit_s, rcond=None)[0]
        worst = int(solved.argmin())
        if solved[worst] >= 0:
            found[free] = solved
            break
        free.pop(worst)
    coefficients: Floats = found / scales
    return coefficients
