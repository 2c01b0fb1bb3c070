"""A measured run beside its simulation: the overhead is found, and the error is told."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.simulate.command import main
from bench.simulate.fitting.fitted_step_time import MOST_FACTORS, LinearStepTime
from bench.simulate.fitting.measured_run import calibrated, read_measured_run
from bench.simulate.requests.arrivals import ArrivalsError, LengthDistribution, SimRequest
from bench.simulate.run import simulate
from bench.simulate.setup import Overhead, Setup
from scheduler.config import Batching, Fairness, SchedulingPolicy
from tests.bench.test_leaps import drawn_setup, drawn_workload

OVERHEAD = Overhead(base_s=0.007, per_prompt_token_s=0.0002)


@pytest.fixture(scope="module")
def setup() -> Setup:
    """One roomy replica."""
    drawn = drawn_setup(Random(1))
    config = replace(
        drawn.config,
        num_blocks=2000,
        policy=SchedulingPolicy.FCFS,
        batching=Batching.MIXED,
        fairness=Fairness.NONE,
    )
    return replace(drawn, config=config, num_replicas=1, step_time=replace(drawn.step_time, variation=()))


def write_run(path: Path, setup: Setup) -> list[SimRequest]:
    """Write a run that was as the model with OVERHEAD says; returns its requests."""
    workload = replace(
        drawn_workload(Random(1)),
        rate_per_s=0.5,
        num_requests=120,
        prompt_lens=LengthDistribution.parse("uniform:1:80"),
        output_lens=LengthDistribution.parse("uniform:2:20"),
        priority_mix=((0, 1.0),),
        tenant_mix=(("", 1.0),),
        num_prefix_groups=0,
    )
    requests = list(workload)
    result = simulate(requests, replace(setup, overhead=OVERHEAD))
    (tally,) = result.classes
    first_s = dict(zip(tally.first_tokens, tally.ttft_s, strict=True))
    gaps = [gap_us / 1e6 for gap_us, count in tally.gaps.items() for _ in range(count)]
    records = [
        {
            "outcome": "completed",
            "start_s": 5.0 + request.arrival_s,
            "ttft_s": first_s[number],
            "e2e_s": tally.e2e_s[number],  # of another: only their distribution is compared
            "chunk_gaps_s": gaps if number == 0 else [],
            "num_prompt_tokens": request.prompt_len,
            "num_cached_tokens": 0,
            "num_output_tokens": request.max_tokens,
            "priority": 0,
        }
        for number, request in enumerate(requests)
    ]
    path.write_text(json.dumps({"requests": records}))
    return requests


@pytest.fixture(scope="module")
def measured(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured") / "run.json"
    write_run(path, setup)
    return path


def test_the_overhead_is_found_and_nothing_is_off_then(setup: Setup, measured: Path) -> None:
    found, errors = calibrated(setup, read_measured_run(measured))
    assert found.overhead.base_s == pytest.approx(OVERHEAD.base_s, abs=0.002)
    assert found.overhead.per_prompt_token_s == pytest.approx(OVERHEAD.per_prompt_token_s, abs=0.00005)
    assert [(error.name, error.percentile) for error in errors] == [
        (name, percentile) for name in ("TTFT", "ITL", "End to end") for percentile in ("p50", "p99")
    ]
    assert all(abs(error.share) < 0.05 for error in errors)


def test_a_machine_that_was_slow_for_a_while_is_no_error_beside_its_own_trace(
    setup: Setup, tmp_path: Path
) -> None:
    """Three times as slow for one minute of four, by a clock that began at 1,000 s."""
    model = replace(
        setup.step_time, variation=(1.0, 3.0, 1.0), moments_s=(0.0, 1060.0, 1120.0), origin_s=1000.0
    )
    path = tmp_path / "run.json"
    requests = write_run(path, replace(setup, step_time=model))
    run = read_measured_run(path)
    traced = traced_beside(model, requests)
    own = calibrated(replace(setup, step_time=traced), run)[1]
    assert all(abs(error.share) < 0.05 for error in own)
    other = calibrated(replace(setup, step_time=replace(traced, arrivals_s=(3.0,))), run)[1]
    assert max(abs(error.share) for error in other) > 0.2


def traced_beside(model: LinearStepTime, requests: list[SimRequest]) -> LinearStepTime:
    """The model with arrivals of these requests, 1,000 s after its clock began, and of one before them."""
    return replace(
        model,
        origin_s=None,
        arrivals_s=(3.0, *(1000.02 + each.arrival_s for each in requests)),
        lengths=(9, *(each.prompt_len + each.max_tokens for each in requests)),
    )


def test_the_trace_of_another_run_at_the_same_moments_is_told_by_the_lengths(
    setup: Setup, tmp_path: Path
) -> None:
    requests = write_run(tmp_path / "run.json", setup)
    run = read_measured_run(tmp_path / "run.json")
    traced = traced_beside(setup.step_time, requests)
    assert run.origin_s(traced) == pytest.approx(1000.02)
    overtaking = replace(traced, lengths=(9, *sorted(traced.lengths[1:])))
    assert run.origin_s(overtaking) == pytest.approx(1000.02)
    drawn = Random(2)
    others = tuple(drawn.randint(1, 80) + drawn.randint(2, 20) for _ in traced.lengths)
    assert run.origin_s(replace(traced, lengths=others)) is None


def test_a_trace_of_whose_begin_no_speed_was_kept_is_not_replayed(setup: Setup, tmp_path: Path) -> None:
    requests = write_run(tmp_path / "run.json", setup)
    run = read_measured_run(tmp_path / "run.json")
    traced = traced_beside(setup.step_time, requests)
    for start_s, is_known in ((999.0, True), (1001.0, False)):
        moments_s = tuple(start_s + place / 100 for place in range(MOST_FACTORS))
        cut = replace(traced, variation=(1.0,) * MOST_FACTORS, moments_s=moments_s)
        assert (run.origin_s(cut) is not None) == is_known


def test_a_slower_run_than_the_model_is_told_as_an_error(setup: Setup, measured: Path) -> None:
    faster = replace(setup, step_time=replace(setup.step_time, base_s=setup.step_time.base_s / 2))
    errors = {
        (each.name, each.percentile): each.share
        for each in calibrated(faster, read_measured_run(measured))[1]
    }
    assert errors["ITL", "p50"] < -0.3


def test_how_steps_vary_is_drawn_several_times_and_the_middle_counts(setup: Setup, tmp_path: Path) -> None:
    varied = replace(setup, step_time=replace(setup.step_time, variation=(0.6, 0.9, 1.0, 1.1, 1.6)))
    path = tmp_path / "run.json"
    write_run(path, varied)
    errors = calibrated(varied, read_measured_run(path))[1]
    for error in errors:
        assert len(error.draws) == 9
        assert sorted(error.draws) == list(error.draws)
        assert error.draws[0] <= error.measured <= error.draws[-1], "it is one draw of many"
    (wide,) = [error for error in errors if (error.name, error.percentile) == ("TTFT", "p99")]
    assert wide.draws[0] < wide.simulated < wide.draws[-1]
    assert f"{wide.draws[0]:.1f} to {wide.draws[-1]:.1f} by the draw" in str(wide)


def test_a_run_of_the_same_load_says_how_far_apart_two_runs_are(
    setup: Setup, measured: Path, tmp_path: Path, capsys
) -> None:
    slow = tmp_path / "slow.json"
    write_run(slow, replace(setup, step_time=replace(setup.step_time, base_s=2 * setup.step_time.base_s)))
    words = ["--measured", str(measured), "--num-blocks", "2000", "--measured-again"]
    assert main([*words, str(slow)]) == 0
    assert capsys.readouterr().out.count("; measured again ") == 6
    (itl,) = [
        error
        for error in calibrated(setup, read_measured_run(measured), read_measured_run(slow))[1]
        if (error.name, error.percentile) == ("ITL", "p50")
    ]
    assert itl.again is not None
    assert itl.again > 1.3 * itl.measured


def test_a_run_of_another_load_is_refused(setup: Setup, measured: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other.json"
    records = json.loads(measured.read_text())["requests"]
    other.write_text(json.dumps({"requests": records[1:]}))
    assert main(["--measured", str(measured), "--measured-again", str(other)]) == 2
    assert "not a run of the same load" in capsys.readouterr().err
    assert main(["--measured-again", str(other)]) == 2
    assert "--measured, which is not given" in capsys.readouterr().err


def test_the_command_prints_the_error_above_the_numbers(measured: Path, capsys) -> None:
    assert main(["--measured", str(measured), "--num-blocks", "2000"]) == 0
    out = capsys.readouterr().out
    assert "Requests   from" in out
    assert "Overhead " in out
    assert out.count("\nFit ") == 6
    assert main(["--measured", str(measured), "--request-ms", "1"]) == 2


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"requests": []}')
    with pytest.raises(ArrivalsError, match="no completed"):
        read_measured_run(path)
    path.write_text('{"request": 1}')
    with pytest.raises(ArrivalsError, match="bench serve --json"):
        read_measured_run(path)
