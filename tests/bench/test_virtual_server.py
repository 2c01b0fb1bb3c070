"""The simulator beside the engine's own loop, on a machine that both know only by its steps."""

from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import pytest

from bench.simulate.fitting.fitted_step_time import fit
from bench.simulate.fitting.measured_run import Error, calibrated, read_measured_run
from bench.simulate.replica import Replica
from bench.simulate.setup import Setup
from bench.trace.reading import read_trace
from scheduler.config import SchedulerConfig
from tests.bench.virtual_server import QUIET, Machine, Request, serve

pytestmark = pytest.mark.night

ON_CPU = SchedulerConfig(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    num_blocks=4000,
    block_size=16,
    max_model_len=2048,
    max_prefill_tokens=256,
    target_itl_s=0.07,
    uncrowded_itl_s=0.5,
    least_prefill_share=0.5,
    large_crowd_prefill_share=0.85,
    prefill_patience_s=4.0,
)
"""Configuration of `tokenyard serve` on a CPU without options."""
PACED = replace(ON_CPU, uncrowded_itl_s=0.0, large_crowd_prefill_share=None)
"""Each prompt is cut, by what the pace has learnt."""


def requests(rate_per_s: float, seed: int = 0) -> list[Request]:
    random, now_s = Random(seed), 1003.0
    drawn = []
    for _ in range(100):
        now_s += random.expovariate(rate_per_s)
        drawn.append(Request(now_s, 128, 64))
    return drawn


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompt tokens of each simulated step with any."""
    found: list[int] = []
    begin = Replica._begin

    def noting(replica: Replica, plan: Any, now_s: float) -> float:
        num_tokens = sum(share.num_tokens for share in plan.scheduled if share.num_tokens > 1)
        if num_tokens:
            found.append(num_tokens)
        return begin(replica, plan, now_s)

    monkeypatch.setattr(Replica, "_begin", noting)
    return found


def simulated_errors(folder: Path, config: SchedulerConfig) -> dict[str, Error]:
    setup = Setup(name="", config=config, step_time=fit(read_trace(folder / "steps.jsonl")).model)
    errors = calibrated(setup, read_measured_run(folder / "run.json"))[1]
    return {f"{error.name} {error.percentile}": error for error in errors}


@pytest.mark.parametrize("between_s", [0.003])
def test_on_a_machine_that_does_not_vary_the_simulator_repeats_the_engine(
    tmp_path: Path, chunks: list[int], between_s: float
) -> None:
    measured = serve(tmp_path, PACED, replace(QUIET, between_s=between_s), requests(2.0))
    errors = simulated_errors(tmp_path, PACED)
    assert mean(chunks) == pytest.approx(mean(measured), rel=0.02)
    for name, error in errors.items():
        assert abs(error.share) < 0.025, name


@pytest.mark.parametrize(("config", "rate_per_s"), [(ON_CPU, 3.0), (PACED, 3.0)])
def test_on_a_machine_whose_steps_vary_chunks_and_latencies_are_those_of_the_engine(
    tmp_path: Path, chunks: list[int], config: SchedulerConfig, rate_per_s: float
) -> None:
    """Steps are late by some milliseconds: a decode by its own length, a prompt by a small part of it."""
    measured = serve(tmp_path, config, Machine(), requests(rate_per_s, seed=1), seed=1)
    errors = simulated_errors(tmp_path, config)
    assert mean(chunks) == pytest.approx(mean(measured), rel=0.03)
    for name, error in errors.items():
        assert abs(error.share) < (0.05 if error.percentile == "p50" else 0.1), name
