"""The fewest replicas, or the highest load, by which enough requests keep to an SLO.

Owns: the search, and the order in which candidates are tried.
Never: a rule of service; each run is that of `tokenyard simulate`.

Candidates are steps of a ladder: a step up serves no fewer requests in time. Routers break that by a request
or two at times, so the steps just below the answer are tried one by one, and the answer with several seeds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from bench.simulate.requests.arrivals import SyntheticWorkload, Workload
from bench.simulate.run import RunResult, TooManyMissesError, simulate
from bench.simulate.setup import Setup
from bench.simulate.tally import Slo

_NUM_SEEDS = 3
_LOAD_FACTOR = 1.02
"""Factor between two loads that are tried last."""
_LEAST_LOAD, _MOST_LOAD = 1e-9, 1e6
_ALONE_S = 1e6
"""Time between requests that come one at a time; beyond any reply, and short enough for exact sums."""
_NUM_NEIGHBOURS = 4
_NUM_LOOKED_AT = 2000
_CROWDED = 8
"""Requests of a replica, below which it is asked whether any number of replicas would do."""


class Sought(StrEnum):
    """Quantity that is sought."""

    REPLICAS = "replicas"  # the fewest
    LOAD = "load"  # the highest, as a factor of the rate of arrivals


class UnattainableError(Exception):
    """SLO that nothing keeps, or that nothing breaks; the text says which, with figures."""


class Target(NamedTuple):
    """Share of the requests that must keep to an SLO."""

    slo: Slo
    share: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate, simulated with each seed in turn until one misses the target."""

    setup: Setup
    runs: tuple[RunResult, ...]
    """Runs that were not given up."""
    holds: bool


class Answer(NamedTuple):
    found: Trial
    below: Trial | None
    """The step below it, which misses the target. None: there is no step below."""


def find(
    workload: Workload, base: Setup, target: Target, sought: Sought, note: Callable[[Trial], None]
) -> Answer:
    """Search by doubling, then by halving the range. Raises UnattainableError, Stuck.

    `note` is called with each trial. Replicas are counted from 1, whatever `base` has; loads are factors of
    its load.
    """
    return _Search(workload, base, target, sought, note).answer()


class _Search:
    def __init__(
        self, workload: Workload, base: Setup, target: Target, sought: Sought, note: Callable[[Trial], None]
    ) -> None:
        self._workload = workload
        self._base = base
        self._target = target
        self._sought = sought
        self._note = note
        self._num_requests = sum(1 for _ in workload)
        self._max_misses = self._num_requests - math.ceil(target.share * self._num_requests)
        self._trials: dict[int, Trial] = {}
        is_drawn = isinstance(workload, SyntheticWorkload) or bool(base.step_time.variation)
        self._num_seeds = _NUM_SEEDS if is_drawn else 1

    def answer(self) -> Answer:
        self._refuse_hopeless(_NUM_LOOKED_AT)
        bad, good = self._range()
        while good - bad > 1:
            middle = (bad + good) // 2
            if self._holds(middle):
                good = middle
            else:
                bad = middle
        good = self._lowest_neighbour(good)
        while not (found := self._try(good, self._num_seeds)).holds:
            if good > self._num_requests:
                raise UnattainableError(f"not each draw of the requests can keep to {self._target.slo}")
            good += 1
        if good == 1 and self._sought is Sought.REPLICAS:
            return Answer(found, None)
        return Answer(found, self._try(good - 1, self._num_seeds))

    def _lowest_neighbour(self, good: int) -> int:
        """Return the lowest step that holds and is reached from `good` by a few steps at a time."""
        least = 1 if self._sought is Sought.REPLICAS else good - _NUM_NEIGHBOURS
        for step in range(good - 1, max(good - _NUM_NEIGHBOURS, least) - 1, -1):
            if self._holds(step):
                return self._lowest_neighbour(step)
        return good

    def _range(self) -> tuple[int, int]:
        """Return a step that misses the target and a higher one that holds."""
        if self._sought is Sought.REPLICAS:
            bad, good = 0, 1
            while not self._holds(good):
                if good >= self._num_requests:
                    raise UnattainableError(f"with {good} replicas, too, too few keep to {self._target.slo}")
                bad, good = good, 2 * good
                if bad <= self._num_requests / _CROWDED < good:
                    self._refuse_hopeless(self._num_requests)
            return bad, good
        step = 1
        if self._holds(0):
            while self._holds(-step):
                if _LOAD_FACTOR**step > _MOST_LOAD:
                    raise UnattainableError(
                        f"at {_MOST_LOAD:g} times the load, too, they keep to {self._target.slo}"
                    )
                step *= 2
            return -step, -(step // 2)
        while not self._holds(step):
            step *= 2
            if _LOAD_FACTOR**step > 1 / _LEAST_LOAD:
                raise UnattainableError(
                    f"at {_LEAST_LOAD:g} times the load, too, too few keep to {self._target.slo}"
                )
        return step // 2, step

    def _refuse_hopeless(self, num_requests: int) -> None:
        """Refuse what even requests that come one at a time miss, on a replica that keeps all prefixes.

        Looks at the first `num_requests` of them: without others to share its steps, a request takes long to
        simulate.
        """
        alone = replace(self._base, num_replicas=1, roles=None, load=1.0)
        # Traces have requests of one moment, which no load takes apart.
        requests = (
            each._replace(arrival_s=number * _ALONE_S)
            for number, each in enumerate(islice(self._workload, num_requests))
        )
        try:
            simulate(requests, alone, self._target.slo, max_misses=self._max_misses)
        except TooManyMissesError:
            slo, share = self._target
            raise UnattainableError(
                f"even of requests that come one at a time fewer than {share:.2%} keep to {slo}"
            ) from None

    def _drawn(self, seed: int) -> Workload:
        """Return the requests; those that are drawn, drawn with another seed."""
        if isinstance(self._workload, SyntheticWorkload):
            return replace(self._workload, seed=self._workload.seed + seed)
        return self._workload

    def _holds(self, step: int) -> bool:
        return self._try(step, 1).holds

    def _try(self, step: int, num_seeds: int) -> Trial:
        known = self._trials.get(step)
        if known is not None and (not known.holds or len(known.runs) >= num_seeds):
            return known
        setup = self._setup(step)
        runs: list[RunResult] = []
        for seed in range(num_seeds):
            drawn, run = self._drawn(seed), replace(setup, draw=seed)
            try:
                runs.append(simulate(drawn, run, self._target.slo, max_misses=self._max_misses))
            except TooManyMissesError:
                break
        trial = self._trials[step] = Trial(setup, tuple(runs), len(runs) == num_seeds)
        self._note(trial)
        return trial

    def _setup(self, step: int) -> Setup:
        if self._sought is Sought.REPLICAS:
            return replace(self._base, name=f"replicas={step}", num_replicas=step)
        load = self._base.load / _LOAD_FACTOR**step
        return replace(self._base, name=f"load={load:.4g}", load=load)


def good_share(result: RunResult) -> float:
    """Share of the requests that kept to the SLO, of all that arrived."""
    num_arrived = sum(tally.num_arrived for tally in result.classes)
    return sum(tally.num_good for tally in result.classes) / num_arrived if num_arrived else 0.0
