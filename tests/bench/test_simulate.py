"""The scheduler in virtual time: what is reported is what arithmetic says, and nothing is left to chance."""

import gc
from dataclasses import replace
from math import inf
from random import Random

import pytest

from bench.simulate.fitting.fitted_step_time import LinearStepTime
from bench.simulate.replica import Replica, Stuck, Tallies
from bench.simulate.report import RunReport, report_of
from bench.simulate.requests.arrivals import (
    LengthDistribution,
    RequestUnderWay,
    SimRequest,
    SyntheticWorkload,
)
from bench.simulate.router import LeastBusy, RouterKind, router_of
from bench.simulate.run import simulate
from bench.simulate.setup import Setup, variant, with_drafts
from bench.simulate.tally import GapCounts, QueueLine, Slo
from scheduler.config import PreemptionMode, PrefixCaching, SchedulerConfig, SchedulingPolicy

MODEL = LinearStepTime(base_s=0.010, per_token_s=0.001, per_decode_s=0.002, per_context_token_s=0.0001)
ROOMY = SchedulerConfig(
    num_blocks=10_000, block_size=16, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096
)
NO_SLO = Slo(ttft_s=inf, itl_s=inf)


def one_replica(config: SchedulerConfig = ROOMY, **changes: object) -> Setup:
    return replace(Setup(name="test", config=config, step_time=MODEL), **changes)


def ms(model: LinearStepTime, tokens: int, decodes: int, context: int) -> float:
    return 1000 * model.seconds(tokens, decodes, context)


def workload(**changes: object) -> SyntheticWorkload:
    settings: dict[str, object] = {
        "num_requests": 300,
        "rate_per_s": 20.0,
        "burstiness": 1.0,
        "prompt_lens": LengthDistribution.parse("uniform:10:60"),
        "output_lens": LengthDistribution.parse("uniform:1:30"),
        "priority_mix": ((0, 1.0),),
        "tenant_mix": (("", 1.0),),
        "num_prefix_groups": 0,
        "prefix_len": 0,
        "seed": 5,
    }
    return SyntheticWorkload(**(settings | changes))


def run(requests: object, config: SchedulerConfig = ROOMY, slo: Slo = NO_SLO, **changes: object) -> RunReport:
    return report_of(simulate(requests, one_replica(config, **changes), slo))


def test_one_request_alone_takes_what_the_model_says() -> None:
    report = run([SimRequest(arrival_s=2.0, prompt_len=100, max_tokens=4)])
    (only,) = report.classes
    first = ms(MODEL, 100, 0, 100)
    gaps = [ms(MODEL, 1, 1, 100 + n) for n in (1, 2, 3)]
    assert only.ttft_ms.max == pytest.approx(first)
    assert only.itl_ms.count == 3
    assert only.itl_ms.max == pytest.approx(gaps[-1], abs=1e-3)
    assert only.itl_ms.mean == pytest.approx(sum(gaps) / 3, abs=1e-3)
    assert only.e2e_ms.max == pytest.approx(first + sum(gaps))
    assert report.duration_s == pytest.approx(2.0 + (first + sum(gaps)) / 1000)
    assert report.busy_share == pytest.approx((first + sum(gaps)) / 1000 / report.duration_s)
    assert only.num_output_tokens == 4
    assert report.num_steps == 4


def test_a_prompt_beyond_the_budget_takes_several_chunks() -> None:
    report = run([SimRequest(arrival_s=0.0, prompt_len=600, max_tokens=1)])
    expected = ms(MODEL, 512, 0, 512) + ms(MODEL, 88, 0, 600)
    assert report.classes[0].ttft_ms.max == pytest.approx(expected)
    assert report.classes[0].itl_ms is None


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    early = SimRequest(arrival_s=0.0, prompt_len=100, max_tokens=1)
    late = SimRequest(arrival_s=0.05, prompt_len=50, max_tokens=1, priority=1)
    report = run([early, late])
    first_s = MODEL.seconds(100, 0, 100)
    assert first_s > 0.05
    expected = 1000 * (first_s - 0.05) + ms(MODEL, 50, 0, 50)
    assert report.classes[1].ttft_ms.max == pytest.approx(expected)


def test_requests_of_one_moment_share_a_step() -> None:
    report = run([SimRequest(arrival_s=1.0, prompt_len=10, max_tokens=1)] * 3)
    assert report.num_steps == 1
    assert report.classes[0].ttft_ms.max == pytest.approx(ms(MODEL, 30, 0, 30))


def test_gaps_are_counted_as_if_each_token_were_timed() -> None:
    """The shortcut of counting by step gives the mean that the ends of all requests give."""
    config = replace(ROOMY, num_blocks=30, prefix_caching=PrefixCaching.OFF)
    report = run(workload(output_lens=LengthDistribution.parse("uniform:2:60")), config)
    assert sum(report.preemptions.values()) > 10
    (only,) = report.classes
    total_ms = (only.e2e_ms.mean - only.ttft_ms.mean) * only.num_completed
    assert only.itl_ms.count == only.num_output_tokens - only.num_completed
    assert only.itl_ms.mean * only.itl_ms.count == pytest.approx(total_ms, rel=1e-3)


def test_under_overload_priority_serves_the_urgent_first_and_fcfs_does_not() -> None:
    crowd = workload(rate_per_s=200.0, priority_mix=((0, 1.0), (5, 3.0)))
    config = replace(ROOMY, num_blocks=60)
    fcfs = run(crowd, config)
    priority = run(crowd, replace(config, policy=SchedulingPolicy.PRIORITY))
    urgent, ordinary = priority.classes
    assert (urgent.priority, ordinary.priority) == (0, 5)
    assert urgent.ttft_ms.p50 < ordinary.ttft_ms.p50 / 5
    assert fcfs.classes[0].ttft_ms.p50 > fcfs.classes[1].ttft_ms.p50 / 2
    assert any(cause.startswith("displaced") for cause in priority.preemptions)


def test_swapping_costs_copies_and_computes_nothing_twice() -> None:
    config = replace(ROOMY, num_blocks=30, prefix_caching=PrefixCaching.OFF)
    swapping = replace(
        config, num_host_blocks=500, preemption_mode=PreemptionMode.SWAP, copy_s_per_block=0.001
    )
    crowd = workload(output_lens=LengthDistribution.parse("uniform:2:60"))
    recomputed, swapped = run(crowd, config), run(crowd, swapping)
    assert recomputed.recomputed_share > 0
    assert swapped.recomputed_share == 0
    assert set(swapped.preemptions) == {"growth, swapped"}
    free = run(crowd, replace(swapping, copy_s_per_block=0.0))
    assert swapped.duration_s > free.duration_s


def test_the_same_seed_gives_the_same_result_and_another_seed_another() -> None:
    results = [simulate(workload(seed=seed), one_replica()) for seed in (1, 1, 2)]
    assert results[0].duration_s == results[1].duration_s
    assert results[0].queue == results[1].queue
    assert [each.ttft_s for each in results[0].classes] == [each.ttft_s for each in results[1].classes]
    assert results[0].duration_s != results[2].duration_s


def test_more_load_brings_the_same_requests_sooner() -> None:
    base, loaded = run(workload(rate_per_s=1.0)), run(workload(rate_per_s=1.0), load=4.0)
    assert loaded.classes[0].num_output_tokens == base.classes[0].num_output_tokens
    assert loaded.duration_s < base.duration_s / 3
    assert loaded.classes[0].e2e_ms.mean > base.classes[0].e2e_ms.mean


def test_goodput_counts_who_kept_to_both_bounds() -> None:
    quick = SimRequest(arrival_s=0.0, prompt_len=10, max_tokens=5)
    slow_to_start = SimRequest(arrival_s=10.0, prompt_len=400, max_tokens=5)
    slow_to_go_on = [SimRequest(arrival_s=20.0, prompt_len=10, max_tokens=5)] * 20
    slo = Slo(ttft_s=0.300, itl_s=0.020)
    report = run([quick, slow_to_start, *slow_to_go_on], slo=slo)
    assert report.classes[0].num_good == 1
    assert report.good_share == pytest.approx(1 / 22)
    assert run([quick, slow_to_start], slo=Slo(ttft_s=inf, itl_s=0.1)).good_share == 1.0


def test_what_never_fits_is_rejected_and_what_outgrows_the_pool_is_cut_short() -> None:
    config = replace(ROOMY, num_blocks=4)
    too_long = SimRequest(arrival_s=0.0, prompt_len=100, max_tokens=1)
    outgrows = SimRequest(arrival_s=1.0, prompt_len=50, max_tokens=100)
    (only,) = run([too_long, outgrows], config).classes
    assert (only.num_arrived, only.num_rejected, only.num_completed, only.num_cut_short) == (2, 1, 1, 1)
    # 64 slots hold the prompt and 14 tokens; the 15th was drawn, but could not be computed any more.
    assert only.num_output_tokens == 15


def test_a_shared_prefix_is_computed_once_by_its_group() -> None:
    grouped = workload(
        prompt_lens=LengthDistribution.parse("80"),
        num_prefix_groups=2,
        prefix_len=64,
        output_lens=LengthDistribution.parse("1"),
    )
    report = run(grouped)
    assert report.prefix_hit_share == pytest.approx(64 / 80, rel=0.02)
    assert run(replace(grouped, num_prefix_groups=0)).prefix_hit_share == 0


def test_percentiles_of_gaps_are_those_of_the_listed_gaps() -> None:
    gaps = GapCounts()
    for gap_ms in range(1, 101):
        gaps.add(gap_ms / 1e3, 10)
    found = gaps.distribution_ms()
    assert (found.count, found.p50, found.p90, found.p99, found.max) == (1000, 50.0, 90.0, 99.0, 100.0)
    assert found.mean == pytest.approx(50.5)
    assert GapCounts().distribution_ms() is None


def test_the_queue_line_stays_short_and_keeps_its_peaks() -> None:
    line = QueueLine()
    for second in range(100_000):
        line.add(float(second), 999 if second == 77_777 else second % 10)
    assert len(line.points) < 5000
    times = [at for at, _ in line.points]
    assert times == sorted(times)
    peak_at = next(at for at, waiting in line.points if waiting == 999)
    assert peak_at <= 77_777 < peak_at + 200


def replicas(number: int) -> list[Replica]:
    tallies = Tallies()
    return [Replica(ROOMY, MODEL, tallies, NO_SLO) for _ in range(number)]


def place(request: SimRequest, replica: Replica, number: int) -> None:
    replica.add(RequestUnderWay(request, (number,) * request.prompt_len, number, [], None), 0.0)


@pytest.mark.parametrize("kind", [RouterKind.LEAST_WAITING, RouterKind.ROUND_ROBIN])
def test_a_router_balances_equal_requests(kind: RouterKind) -> None:
    all_replicas = replicas(3)
    line = LeastBusy(all_replicas)
    route = router_of(kind, all_replicas, line)
    request = SimRequest(arrival_s=0.0, prompt_len=5, max_tokens=5)
    for number in range(12):
        chosen = route(request)
        place(request, all_replicas[chosen], number)
        line.note(chosen)
    assert [replica.num_waiting for replica in all_replicas] == [4, 4, 4]


def test_the_least_busy_is_the_one_that_a_look_at_all_would_find() -> None:
    random, all_replicas = Random(3), replicas(20)
    line = LeastBusy(all_replicas)
    for _ in range(2000):
        changed = random.randrange(20)
        all_replicas[changed].num_waiting = random.randrange(4)
        all_replicas[changed].num_running = random.randrange(4)
        line.note(changed)
        busy = [(replica.num_waiting, replica.num_running) for replica in all_replicas]
        assert line.first() == busy.index(min(busy))
        assert len(line._heap) <= 4 * 20


def test_a_prefix_group_stays_where_its_prefix_is_until_too_many_wait() -> None:
    all_replicas = replicas(2)
    line = LeastBusy(all_replicas)
    route = router_of(RouterKind.PREFIX_AWARE, all_replicas, line)
    request = SimRequest(arrival_s=0.0, prompt_len=5, max_tokens=5, prefix_group="a", prefix_len=4)
    chosen = []
    for number in range(11):
        chosen.append(route(request))
        place(request, all_replicas[chosen[-1]], number)
        line.note(chosen[-1])
    assert chosen == [0] * 9 + [1] * 2


def test_prefix_aware_routing_finds_more_in_the_caches() -> None:
    config = replace(ROOMY, num_blocks=120)
    grouped = workload(
        prompt_lens=LengthDistribution.parse("uniform:500:600"),
        num_prefix_groups=8,
        prefix_len=480,
        rate_per_s=1.0,
    )
    aware = run(grouped, config, num_replicas=4, router=RouterKind.PREFIX_AWARE)
    turns = run(grouped, config, num_replicas=4, router=RouterKind.ROUND_ROBIN)
    assert aware.prefix_hit_share > turns.prefix_hit_share + 0.2


def test_twice_the_replicas_serve_an_overload_in_half_the_time() -> None:
    crowd = workload(rate_per_s=inf)
    one, two = run(crowd), run(crowd, num_replicas=2)
    assert two.duration_s == pytest.approx(one.duration_s / 2, rel=0.25)
    assert two.classes[0].num_completed == 300


def test_a_scheduler_that_plans_nothing_is_reported_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = replicas(1)[0].scheduler.schedule(now_s=0.0)
    monkeypatch.setattr("scheduler.scheduler.Scheduler.schedule", lambda _, *, now_s: empty)
    with pytest.raises(Stuck, match="waiting=1"):
        run([SimRequest(arrival_s=0.0, prompt_len=5, max_tokens=5)])


BURST = [SimRequest(arrival_s=0.0, prompt_len=32, max_tokens=500) for _ in range(4)]


def with_rates(*rates: float, pass_s: float = 0.0, **changes: object) -> RunReport:
    setup = with_drafts(one_replica(), rates, pass_s)
    return report_of(simulate(BURST, replace(setup, config=replace(setup.config, **changes)), NO_SLO))


def test_drafts_that_hold_make_fewer_steps_and_take_the_time_of_their_tokens() -> None:
    plain, drafted = run(BURST), with_rates(1.0, 1.0, 1.0, draft_admission="all")
    assert drafted.accepted_share == 1.0
    assert drafted.num_steps == pytest.approx(plain.num_steps / 4, abs=4)
    assert drafted.classes[0].num_output_tokens == plain.classes[0].num_output_tokens
    assert with_rates(0.6, 0.6) == with_rates(0.6, 0.6), "the same to the last bit"


@pytest.mark.parametrize(("rate", "pass_s"), [(0.1, 0.0), (0.9, 0.0), (0.1, 0.004), (0.9, 0.004), (0.9, 0.1)])
def test_the_rule_of_the_server_chooses_among_simulated_drafts(rate: float, pass_s: float) -> None:
    plain = run(BURST).duration_s
    chosen = with_rates(rate, rate, rate, pass_s=pass_s).duration_s
    forced = with_rates(rate, rate, rate, pass_s=pass_s, draft_admission="all").duration_s
    assert chosen <= 1.03 * plain
    assert chosen <= 1.1 * forced, "the first steps measure, and the context grows fast"


def test_variants_may_have_other_drafts() -> None:
    base = with_drafts(one_replica(), (0.5, 0.5), 0.0)
    other = variant(base, "draft_rates=0.9:0.8:0.7+draft_pass_ms=3")
    assert other.drafts.rates == (0.9, 0.8, 0.7)
    assert (other.config.max_drafts, other.config.draft_supply) == (3, "asked")


def test_requests_leave_no_cycles_so_that_nobody_need_look_for_them() -> None:
    def num_in_cycles(num_requests: int) -> int:
        gc.collect()
        gc.disable()
        simulate(workload(num_requests=num_requests), one_replica())
        assert not gc.isenabled()
        gc.enable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        # The replica is in a cycle itself, and keeps tuples of ids for free blocks, of times for forecasts.
        found = [each for each in gc.garbage if type(each) is not tuple or not all(map(is_number, each))]
        gc.garbage.clear()
        return len(found)

    def is_number(each: object) -> bool:
        return isinstance(each, int | float)

    assert num_in_cycles(200) <= num_in_cycles(10) + 5
    simulate(workload(num_requests=10), one_replica())
    assert gc.isenabled()
