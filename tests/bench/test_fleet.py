"""Replicas that come and go: the rule, that no request is lost, and that histories are the same ones."""

from dataclasses import replace
from math import inf

import pytest

from bench.simulate.command import main
from bench.simulate.fitting.fitted_step_time import LinearStepTime
from bench.simulate.fleets.autoscaler import Autoscaler, FleetRule
from bench.simulate.replica import Stepping, Stuck
from bench.simulate.report import report_of
from bench.simulate.requests.arrivals import LengthDistribution, SyntheticWorkload
from bench.simulate.router import RouterKind
from bench.simulate.run import RunResult, simulate
from bench.simulate.setup import Setup
from scheduler.config import SchedulerConfig

STEP = LinearStepTime(base_s=0.02, per_token_s=4e-5, per_decode_s=1e-3, per_context_token_s=4e-8)
CONFIG = SchedulerConfig(
    **{"num_blocks": 400, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 512},
    max_model_len=2048,
)


def requests(num: int, rate: float, seed: int = 0) -> SyntheticWorkload:
    return SyntheticWorkload(
        num_requests=num,
        rate_per_s=rate,
        burstiness=1.0,
        prompt_lens=LengthDistribution.parse("uniform:20:200"),
        output_lens=LengthDistribution.parse("uniform:5:80"),
        priority_mix=((0, 1.0), (5, 1.0)),
        tenant_mix=(("", 1.0),),
        num_prefix_groups=3,
        prefix_len=64,
        seed=seed,
    )


def setup(num_replicas: int = 1, **changes: object) -> Setup:
    base = Setup(name="base", config=CONFIG, step_time=STEP, num_replicas=num_replicas)
    return replace(base, **changes)


def counts(result: RunResult) -> tuple[int, int]:
    tallies = result.classes
    return sum(each.num_arrived for each in tallies), sum(each.num_completed for each in tallies)


def test_replicas_are_added_two_a_minute_and_removed_one_by_one_after_ten_quiet_minutes() -> None:
    scaler, numbers, now = Autoscaler(FleetRule(least=1, most=6)), [], 1
    for poll in range(120):
        num_waiting = 60 if poll < 8 else 0
        now = scaler.number(poll * 15.0, now, num_waiting=num_waiting, kv_use=0.1)
        numbers.append(now)
    assert numbers[:9] == [3, 3, 3, 3, 5, 5, 5, 5, 5], "60 wait for 8 replicas, 6 are the most"
    last_quiet = max(place for place, number in enumerate(numbers) if number == 5)
    assert (last_quiet + 1) * 15 > 7 * 15 + 600
    assert numbers[last_quiet + 1 :: 8][:5] == [4, 3, 2, 1, 1], "every 120 s"


def test_a_signal_within_a_tenth_changes_nothing_and_kv_use_counts_too() -> None:
    scaler = Autoscaler(FleetRule(least=1, most=9))
    assert scaler.number(0.0, 4, num_waiting=35, kv_use=0.0) == 4
    assert scaler.number(15.0, 4, num_waiting=0, kv_use=4.2) == 5


@pytest.mark.parametrize("router", [RouterKind.LEAST_WAITING, RouterKind.PREFIX_AWARE])
def test_replicas_that_never_come_nor_go_are_those_of_a_fixed_number(router: RouterKind) -> None:
    fixed = simulate(requests(300, 12.0), setup(3, router=router))
    fleet = setup(router=router, fleet=FleetRule(least=3, most=3))
    assert report_of(simulate(requests(300, 12.0), fleet)) == report_of(fixed)


@pytest.mark.parametrize("seed", range(4))
def test_no_request_is_lost_when_replicas_fail_start_and_leave(seed: int) -> None:
    rule = FleetRule(least=1, most=5, start_s=20.0, mean_life_s=60.0)
    result = simulate(requests(600, 14.0, seed), setup(fleet=rule, draw=seed))
    assert counts(result) == (600, 600)
    assert sum(len(each.ttft_s) for each in result.classes) == 600, "a first token comes once"
    assert 2 <= result.max_replicas <= 5
    assert 1 <= result.replica_s / result.duration_s <= 5
    assert sum(result.busy_s) <= result.replica_s


def test_leaps_over_steps_end_where_a_replica_fails() -> None:
    rule = FleetRule(least=2, most=2, start_s=5.0, mean_life_s=8.0)
    leaping, stepping = (
        simulate(requests(60, 3.0), setup(fleet=rule, stepping=each))
        for each in (Stepping.LEAP, Stepping.EACH)
    )
    assert leaping.num_replicas > 4, "some have failed"
    assert leaping.classes[0].e2e_s == pytest.approx(stepping.classes[0].e2e_s)


def test_a_request_that_no_replica_lives_for_ends_the_run() -> None:
    with pytest.raises(Stuck, match="lost 100 replicas"):
        simulate(requests(5, 5.0), setup(fleet=FleetRule(least=1, most=1, start_s=1.0, mean_life_s=0.01)))


@pytest.mark.parametrize("mean_life_s", [inf, 60.0])
def test_a_run_ends_whose_requests_are_all_refused_before_a_first_step(mean_life_s: float) -> None:
    """Also by a replica that took the place of another."""
    too_long = replace(requests(30, 0.1), prompt_lens=LengthDistribution.parse("1900"))
    small = replace(CONFIG, num_blocks=100)
    rule = FleetRule(least=1, most=2, start_s=1.0, mean_life_s=mean_life_s)
    result = simulate(too_long, setup(config=small, fleet=rule))
    assert counts(result) == (30, 0)
    assert sum(each.num_rejected for each in result.classes) == 30


def test_more_replicas_for_a_busy_hour_cost_less_than_all_the_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--num-requests", "1500", "--request-rate", "3", "--prompt-len", "900", "--output-len", "60"]
    small = ["--num-blocks", "400", "--max-num-seqs", "4", "--step-base-ms", "25"]
    assert main([*words, *small, "--autoscale", "1:6", "--start-s", "30"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Replicas, mean")]
    assert 1 < float(line.split()[-1]) < 6


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--autoscale", "3:2"], "LEAST:MOST"),
        (["--autoscale", "1:3", "--replicas", "2"], "--replicas cannot be given"),
        (["--autoscale", "1:3", "--router", "one-line"], "least-waiting or prefix-aware"),
        (["--autoscale", "1:3", "--find", "replicas", "--slo-ttft-ms", "100"], "there all the time"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_in_a_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--num-requests", "5"]) == 2
    assert line in capsys.readouterr().err


def test_a_rule_without_failures_lets_replicas_live_for_ever() -> None:
    assert FleetRule(least=1, most=1).life_s(None) == inf  # type: ignore[arg-type]
