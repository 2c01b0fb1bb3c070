"""The planner: fewest replicas and highest load by which enough requests keep to an SLO."""

from dataclasses import replace
from random import Random

import pytest

from bench.simulate.command import main
from bench.simulate.find import Sought, Target, Trial, UnattainableError, find, good_share
from bench.simulate.run import TooManyMissesError, simulate
from bench.simulate.tally import Slo
from tests.bench.test_simulate import one_replica, workload

SLO = Slo(ttft_s=0.4, itl_s=0.05)
SMALL = ("--num-requests", "200", "--prompt-len", "uniform:5:40", "--output-len", "uniform:1:20")


def ignore(_: Trial) -> None:
    """Note nothing."""


@pytest.mark.night
def test_the_fewest_replicas_are_those_of_an_exhaustive_search() -> None:
    rng = Random(7)
    answers = set()
    for _ in range(10):
        requests = list(workload(num_requests=60, rate_per_s=rng.uniform(10, 100), seed=rng.randrange(99)))
        target = Target(SLO, rng.choice([0.9, 0.97, 1.0]))
        answer = find(requests, one_replica(), target, Sought.REPLICAS, ignore)
        shares = (
            good_share(simulate(requests, one_replica(num_replicas=num_replicas), SLO))
            for num_replicas in range(1, 99)
        )
        fewest = next(number for number, share in enumerate(shares, start=1) if share >= target.share)
        assert answer.found.setup.num_replicas == fewest
        assert fewest == 1 if answer.below is None else not answer.below.holds
        answers.add(fewest)
    assert len(answers) > 3


def test_the_highest_load_holds_with_each_seed_and_a_step_more_does_not() -> None:
    crowd, target = workload(), Target(SLO, 0.95)
    answer = find(crowd, one_replica(), target, Sought.LOAD, ignore)
    load = answer.found.setup.load
    for seed in range(3):
        drawn = replace(crowd, seed=crowd.seed + seed)
        assert good_share(simulate(drawn, one_replica(load=load), SLO)) >= 0.95
    assert answer.below is not None
    assert answer.below.setup.load == pytest.approx(1.02 * load)
    assert not answer.below.holds


def test_a_run_is_given_up_only_when_more_requests_missed_the_slo_than_may() -> None:
    crowd, base = workload(rate_per_s=5.0), one_replica()
    num_missed = round(300 * (1 - good_share(simulate(crowd, base, SLO))))
    assert 0 < num_missed < 300
    simulate(crowd, base, SLO, max_misses=num_missed)
    with pytest.raises(TooManyMissesError):
        simulate(crowd, base, SLO, max_misses=num_missed - 1)


def test_what_no_number_of_replicas_can_do_is_said_at_once() -> None:
    too_short = Target(Slo(ttft_s=0.001, itl_s=1.0), 0.5)
    with pytest.raises(UnattainableError, match=r"one at a time fewer than 50.00% keep to TTFT at most 1 ms"):
        find(workload(), one_replica(), too_short, Sought.REPLICAS, ignore)
    with pytest.raises(UnattainableError, match="times the load, too, they keep to"):
        find(workload(), one_replica(), Target(Slo(ttft_s=1e6, itl_s=1e6), 1.0), Sought.LOAD, ignore)


def test_requests_of_one_moment_are_taken_apart_to_see_whether_any_number_of_replicas_will_do() -> None:
    """Traces have bursts that no load takes apart; one replica has them in time one after the other."""
    burst = [each._replace(arrival_s=0.0) for each in workload(num_requests=40)]
    answer = find(burst, one_replica(), Target(SLO, 0.9), Sought.REPLICAS, ignore)
    assert answer.found.setup.num_replicas > 1


def test_the_answer_is_printed_with_its_trials_price_and_the_step_below(
    capsys: pytest.CaptureFixture,
) -> None:
    words = (*SMALL, "--request-rate", "900", "--slo-ttft-ms", "60", "--find", "replicas", "--price", "2.5")
    assert main(words) == 0
    out = capsys.readouterr().out
    (found,) = [line for line in out.splitlines() if line.startswith("Found")]
    num_replicas = int(found.split("replicas=")[1].split(":")[0])
    assert num_replicas > 1
    assert f"Price      {num_replicas * 2.5:.2f} an hour" in out
    assert "Tried      replicas=1: " in out
    assert "given up" in out
    (title,) = [line for line in out.splitlines() if line.split()[:1] == [f"replicas={num_replicas}"]]
    assert title.split()[1] == f"replicas={num_replicas - 1}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--find", "replicas"), "--find needs --slo-ttft-ms or --slo-itl-ms"),
        (("--find", "replicas", "--slo-ttft-ms", "9", "--compare", "fcfs"), "one variant"),
        (("--find", "replicas", "--slo-ttft-ms", "0.1"), "one at a time fewer than 99.00% keep to"),
        (("--find", "gpus"), "expected replicas or load"),
        (("--attain", "99"), "expected a share above 0"),
    ],
)
def test_a_search_that_cannot_be_made_ends_with_2_and_a_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main((*SMALL, *words)) == 2
    assert message in capsys.readouterr().err
