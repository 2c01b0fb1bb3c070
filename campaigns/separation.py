"""Prefill and decode apart, or together: which serves more requests in time, by simulation?

    python -m campaigns.separation TRACE [TRACE ...]

For each trace: the highest load, as a factor of its rate, at which 95 % of the requests have their first
token within 2 s and 99 % of the times between tokens are at most 100 ms. First of replicas that do both, with
several paces of prompts; then of as many apart, in each ratio at 100 Gbit/s, and the best ratio at other
rates. The rule that the figures are for: docs/decisions/simulator.md.

Owns: the search and the table. Never: a rule of service; each run is that of `tokenyard simulate`.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from bench.simulate.fitting.machines import MACHINES
from bench.simulate.fleets.roles import Roles, Transfer
from bench.simulate.options import CONFIG
from bench.simulate.requests.arrivals import SimRequest
from bench.simulate.requests.files import read_requests
from bench.simulate.router import RouterKind
from bench.simulate.run import RunResult, TooManyMissesError, simulate
from bench.simulate.setup import Setup
from bench.simulate.tally import GapCounts, Slo
from scheduler.config import SchedulerConfig

_TTFT_S, _GAP_S, _SHARE, _TTFT_SHARE = 2.0, 0.1, 0.99, 0.95
_USABLE = 0.94
"""Share of a link's rate that the payload gets."""
_RATES_GBIT = (10, 25, 100, 400)
_FACTOR, _STEP, _LEAST_LOAD = 1.06, 1.4, 0.01
"""Factors between two loads that are told apart, and between two that are tried first."""
_MOST_LOAD = 1e4
"""Load from which on none is tried: a few requests are served at any."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.separation", allow_abbrev=False)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--machine", choices=MACHINES, default="h100-llama-3.1-8b")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--most-requests", type=int, default=4000, help="of each trace, the first ones")
    options = parser.parse_args(argv)
    for path in options.traces:
        requests = list(islice(read_requests(path), options.most_requests))
        rate = (len(requests) - 1) / requests[-1].arrival_s
        print(f"{path.name}: {len(requests)} requests, {rate:.2f}/s; {options.machine}", flush=True)
        best = 0.0
        for setup in _together(options.machine, options.replicas):
            found = _print(requests, setup, rate, best)
            best = max(best, found)
        _apart(requests, options.machine, options.replicas, rate, best)
    return 0


def _apart(requests: list[SimRequest], machine: str, num_replicas: int, rate: float, together: float) -> None:
    """Print what each ratio serves, and the best one at each rate of the network."""
    base = _base(machine, num_replicas)
    loads = {}
    for num_prefill in range(1, num_replicas):
        roles = Roles(num_prefill, num_replicas - num_prefill)
        name = f"{roles.num_prefill}:{roles.num_decode}, 100 Gbit/s"
        setup = replace(base, name=name, roles=roles, transfer=_transfer(machine, 100))
        loads[roles] = _print(requests, setup, rate, together)
    best = max(loads, key=loads.__getitem__)
    for gbit in _RATES_GBIT:
        if gbit != 100:
            name = f"{best.num_prefill}:{best.num_decode}, {gbit} Gbit/s"
            setup = replace(base, name=name, roles=best, transfer=_transfer(machine, gbit))
            _print(requests, setup, rate, together)


def _base(machine: str, num_replicas: int) -> Setup:
    facts = MACHINES[machine]
    config: dict[str, Any] = CONFIG | {"max_model_len": 131_072, "max_num_batched_tokens": 8192}
    config["num_blocks"] = facts.num_cache_tokens // config["block_size"]
    return Setup(
        name="together",
        config=SchedulerConfig(**config),
        step_time=facts.step_time,
        num_replicas=num_replicas,
        router=RouterKind.LEAST_WAITING,
    )


def _together(machine: str, num_replicas: int) -> Iterator[Setup]:
    """Yield replicas that do both, by the pace of their prompts."""
    base = _base(machine, num_replicas)
    for target_s, share in ((inf, 0.0), (0.1, 0.0), (0.1, 0.5), (0.05, 0.5)):
        config = replace(base.config, target_itl_s=target_s, least_prefill_share=share)
        yield replace(base, name=f"together, target {target_s * 1e3:g} ms, share {share:g}", config=config)


def _transfer(machine: str, gbit: float) -> Transfer:
    num_bytes = MACHINES[machine].kv_bytes_per_token
    return Transfer(base_s=0.001, bytes_per_s=_USABLE * gbit * 1e9 / 8, bytes_per_token=num_bytes)


def _print(requests: list[SimRequest], setup: Setup, rate: float, together: float) -> float:
    """Print the highest load that a setup serves in time, and return it."""
    load = _highest_load(requests, setup, together or 1.0)
    ratio = f"{load / together:6.2f} of the best so far" if together else ""
    print(f"  {setup.name:36}{load:8.2f} x{load * rate:8.2f} requests/s{ratio}", flush=True)
    return load


def _highest_load(requests: list[SimRequest], setup: Setup, guess: float) -> float:
    """Return the highest load by steps from a guess, then by halving; 0 where none is served."""
    load = guess
    is_served = _is_served(requests, replace(setup, load=load))
    step = _STEP if is_served else 1 / _STEP
    while _LEAST_LOAD < load < _MOST_LOAD and (
        _is_served(requests, replace(setup, load=load * step)) is is_served
    ):
        load *= step
    if load <= _LEAST_LOAD:
        return 0.0
    good, bad = (load, load * step) if is_served else (load * step, load)
    while bad / good > _FACTOR:
        middle = (good * bad) ** 0.5
        if _is_served(requests, replace(setup, load=middle)):
            good = middle
        else:
            bad = middle
    return good


def _is_served(requests: list[SimRequest], setup: Setup) -> bool:
    most_misses = int((1 - _TTFT_SHARE) * len(requests))
    try:
        result = simulate(requests, setup, Slo(ttft_s=_TTFT_S, itl_s=inf), max_misses=most_misses)
    except TooManyMissesError:
        return False
    return _late_gaps(result) <= 1 - _SHARE


def _late_gaps(result: RunResult) -> float:
    """Share of the times between tokens that are above the limit."""
    gaps = GapCounts()
    for tally in result.classes:
        gaps.include(tally.gaps.items())
    counted = gaps.items()
    late = sum(num for gap_us, num in counted if gap_us > _GAP_S * 1e6)
    return late / max(sum(num for _, num in counted), 1)


if __name__ == "__main__":
    raise SystemExit(main())
