"""Prefill and decode on replicas of their own: nothing is lost, and what a transfer costs is in the times."""

from dataclasses import replace
from itertools import accumulate, repeat
from random import Random

import pytest

from bench.simulate.command import main
from bench.simulate.find import Sought, Target, find
from bench.simulate.fitting.fitted_step_time import LinearStepTime
from bench.simulate.fleets.roles import Roles, Transfer
from bench.simulate.replica import Stepping
from bench.simulate.report import report_of
from bench.simulate.requests.arrivals import LengthDistribution, SimRequest
from bench.simulate.router import RouterKind
from bench.simulate.run import RunResult, simulate
from bench.simulate.setup import Setup
from bench.simulate.tally import Slo
from scheduler.config import HostTier, PreemptionMode, SchedulerConfig
from tests.bench.test_leaps import history
from tests.bench.test_simulate import MODEL, ROOMY, one_replica, workload

FREE = Transfer(base_s=0.0, bytes_per_s=1e30)
SMALL = replace(ROOMY, num_blocks=40, max_num_seqs=8, max_model_len=90)


def split(num_prefill: int, num_decode: int, config: SchedulerConfig = ROOMY, **changes: object) -> Setup:
    roles = Roles(num_prefill, num_decode)
    return one_replica(config, roles=roles, num_replicas=sum(roles), **changes)


def totals(result: RunResult, name: str) -> int:
    return sum(getattr(each, name) for each in result.classes)


def test_one_replica_of_each_role_without_cost_serves_single_requests_as_one_that_does_both() -> None:
    arrivals_s = accumulate(repeat(9.0, 20))
    rng = Random(3)
    requests = [
        SimRequest(at_s, prompt_len=rng.randrange(1, 600), max_tokens=rng.choice([1, 2, 40]))
        for at_s in arrivals_s
    ]
    together, apart = simulate(requests, one_replica()), simulate(requests, split(1, 1, transfer=FREE))
    for name in ("ttft_s", "e2e_s"):
        own, theirs = (list(getattr(each.classes[0], name)) for each in (apart, together))
        assert own == pytest.approx(theirs)
    assert apart.classes[0].gaps.items() == together.classes[0].gaps.items()


@pytest.mark.parametrize("seed", range(8))
def test_every_request_ends_once_with_all_its_tokens_and_leaps_change_nothing(seed: int) -> None:
    draw = Random(seed).choice
    config = replace(
        draw([ROOMY, SMALL]),
        num_host_blocks=draw([0, 0, 0, 60]),
        host_tier=draw(list(HostTier)),
        preemption_mode=draw([PreemptionMode.RECOMPUTE, PreemptionMode.SWAP]),
    )
    setup = split(
        draw([1, 2]),
        draw([1, 3]),
        config,
        transfer=Transfer(base_s=draw([0.0, 0.02]), bytes_per_s=draw([1e8, 1e12])),
        router=draw([RouterKind.LEAST_WAITING, RouterKind.PREFIX_AWARE]),
    )
    requests = workload(
        num_requests=60,
        rate_per_s=draw([5.0, 60.0]),
        output_lens=LengthDistribution.parse("uniform:1:60"),
        num_prefix_groups=draw([0, 4]),
        prefix_len=20,
        seed=seed,
    )
    result = simulate(requests, setup)
    assert history(result) == history(simulate(requests, replace(setup, stepping=Stepping.EACH)))
    assert totals(result, "num_arrived") == totals(result, "num_completed") == 60
    expected = sum(min(each.max_tokens, config.max_model_len - each.prompt_len) for each in requests)
    assert totals(result, "num_output_tokens") == expected
    for tally in result.classes:
        assert len(tally.ttft_s) == len(tally.e2e_s) == tally.num_completed
        assert sum(num for _, num in tally.gaps.items()) == tally.num_output_tokens - tally.num_completed


@pytest.mark.parametrize("transfer", [FREE, Transfer(base_s=0.125, bytes_per_s=1e30)])
def test_leaps_change_nothing_where_transfers_end_as_steps_do(transfer: Transfer) -> None:
    alike = LinearStepTime(base_s=0.125, per_token_s=0.0, per_decode_s=0.0, per_context_token_s=0.0)
    setup = split(1, 1, transfer=transfer, step_time=alike)
    requests = [SimRequest(at_s, prompt_len=20, max_tokens=50) for at_s in (0.0, 1.5, 3.0)]
    each = simulate(requests, replace(setup, stepping=Stepping.EACH))
    assert history(simulate(requests, setup)) == history(each)


def test_a_prompt_that_fills_the_cache_ends_with_its_first_token_in_either_way() -> None:
    requests = [SimRequest(0.0, prompt_len=40 * 16, max_tokens=5)]
    config = replace(SMALL, max_model_len=1000)
    for setup in (one_replica(config), split(1, 1, config)):
        result = simulate(requests, setup)
        assert totals(result, "num_completed") == totals(result, "num_output_tokens") == 1


def test_without_a_swap_space_decode_replicas_swap_nothing_whatever_the_mode() -> None:
    config = replace(SMALL, num_blocks=20, preemption_mode=PreemptionMode.SWAP)
    crowd = workload(num_requests=60, rate_per_s=60.0, output_lens=LengthDistribution.parse("50"))
    result = simulate(crowd, split(1, 1, config))
    assert {cause.split(", ")[1] for cause in result.preemptions} == {"recomputed"}


def test_a_replica_sends_one_prompt_after_the_other() -> None:
    transfer = Transfer(base_s=0.5, bytes_per_s=1000.0, bytes_per_token=100)
    requests = [SimRequest(0.0, prompt_len=each, max_tokens=2) for each in (20, 30, 40)]
    result = simulate(requests, split(1, 3, transfer=transfer))
    (tally,) = result.classes
    (first_s,) = set(tally.ttft_s)
    waits_s = [2.0 + 0.5, 5.0 + 0.5, 9.0 + 0.5]
    steps_s = [MODEL.seconds(1, 1, each + 1) for each in (20, 30, 40)]
    assert [gap_us / 1e6 for gap_us, _ in tally.gaps.items()] == pytest.approx(
        [wait_s + step_s for wait_s, step_s in zip(waits_s, steps_s, strict=True)], abs=1e-5
    )
    assert max(tally.e2e_s) == pytest.approx(first_s + waits_s[-1] + steps_s[-1])


def test_a_request_goes_where_the_fewest_tokens_are_held() -> None:
    long, *short = (SimRequest(0.1 * place, 400 if not place else 20, 200) for place in range(4))
    result = simulate([long, *short], split(1, 2, transfer=FREE, stepping=Stepping.EACH))
    _, *decoding_s = result.busy_s
    kv = result.kv_block_s[1:]
    assert kv[0] / decoding_s[0] > 400 / 16, "the long one"
    assert kv[1] / decoding_s[1] > 2 * 20 / 16, "all the short ones"


def test_the_cache_is_asked_for_a_prompt_once() -> None:
    requests = workload(num_prefix_groups=2, prefix_len=32)
    result = simulate(requests, split(1, 1))
    assert result.num_prefix_queries == sum(each.prompt_len for each in requests)
    assert 0 < result.num_prefix_hits < result.num_prefix_queries / 2 + 32 * 300


def test_long_prompts_delay_no_decode_of_another_replica() -> None:
    """The gain of separation, which a slow network takes back."""
    crowd = workload(num_requests=100, prompt_lens=LengthDistribution.parse("uniform:200:400"), rate_per_s=4)
    step_time = replace(MODEL, per_context_token_s=0.0)
    slow = Transfer(bytes_per_s=1e7)
    setups = [
        one_replica(num_replicas=3, step_time=step_time),
        split(1, 2, step_time=step_time, transfer=FREE),
        split(1, 2, step_time=step_time, transfer=slow),
    ]
    reports = [report_of(simulate(crowd, setup)) for setup in setups]
    longest = [each.classes[0].itl_ms.max for each in reports]
    assert longest[1] < longest[0] / 2 < longest[2]


def test_the_highest_load_of_roles_is_found_too() -> None:
    target = Target(Slo(ttft_s=0.4, itl_s=0.05), 0.9)
    answer = find(list(workload(num_requests=40)), split(1, 1), target, Sought.LOAD, lambda _: None)
    assert answer.found.holds
    assert answer.found.setup.roles == Roles(1, 1)
    assert answer.below is not None
    assert not answer.below.holds


def test_roles_are_columns_and_the_bytes_are_those_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num-requests", "40", "--machine", "h200-llama-3.1-8b-fp8", "--roles", "1:2")
    slow = ("--prompt-len", "1000", "--transfer-gbit", "0.524288")  # 64 KiB a token: 1 s
    assert main((*words, *slow, "--compare", "base,roles=2:1,replicas=3")) == 0
    out = capsys.readouterr().out
    (gaps,) = [line.split()[-3:] for line in out.splitlines() if line.split()[:2] == ["ITL", "max,"]]
    assert float(gaps[0]) > 1000
    assert float(gaps[1]) > 1000
    assert float(gaps[2]) < 1000, "together, nothing travels"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--roles", "2"], "--roles: expected PREFILL:DECODE, as 2:6"),
        (["--roles", ""], "--roles: expected PREFILL:DECODE"),
        (["--roles", "0:2"], "--roles: expected PREFILL:DECODE"),
        (["--roles", "1:1", "--replicas", "2"], "--replicas cannot be given"),
        (["--roles", "1:1", "--router", "one-line"], "least-waiting or prefix-aware"),
        (["--roles", "1:1", "--draft-rates", "0.5"], "without drafts"),
        (["--roles", "1:1", "--mean-life-s", "9"], "replicas that stay"),
        (["--roles", "1:1", "--find", "replicas", "--slo-ttft-ms", "9"], "--find replicas counts"),
        (["--compare", "roles=x"], "expected PREFILL:DECODE, as 2:6, got 'x'"),
    ],
)
def test_roles_that_cannot_be_are_refused_in_a_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--num-requests", "5"]) == 2
    assert line in capsys.readouterr().err
