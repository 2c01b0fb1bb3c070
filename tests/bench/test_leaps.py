"""Leaps over steps in which nothing is decided: the same history as with every step planned, to the bit."""

from dataclasses import asdict, replace
from math import inf
from random import Random
from typing import Any

import pytest

from bench.simulate.fitting.fitted_step_time import LinearStepTime
from bench.simulate.replica import Stepping
from bench.simulate.requests.arrivals import LengthDistribution, PromptMaker, SimRequest, SyntheticWorkload
from bench.simulate.router import RouterKind
from bench.simulate.run import RunResult, simulate
from bench.simulate.setup import Setup
from bench.simulate.tally import Slo
from scheduler.config import Batching, Fairness, PrefixCaching, SchedulerConfig, SchedulingPolicy
from scheduler.scheduler import Scheduler
from tests.invariants import free_blocks, published
from tests.tiers import by_day

_NUM_HISTORIES = 24


def drawn_setup(random: Random) -> Setup:
    draw = random.choice
    config = SchedulerConfig(
        num_blocks=draw([30, 40, 60, 500]),
        block_size=draw([1, 4, 8, 8]),
        max_num_seqs=draw([4, 16, 32]),
        max_num_batched_tokens=draw([64, 256]),
        max_model_len=draw([80, 4096]),
        policy=draw(list(SchedulingPolicy)),
        priority_aging_s=draw([inf, 2.0]),
        watermark=draw([0.0, 0.1]),
        max_bypasses=draw([0, 4]),
        prefix_caching=draw(list(PrefixCaching)),
        target_itl_s=draw([inf, 0.03]),
        max_prefill_tokens=draw([0, 64]),
        max_chunk_tokens=draw([0, 32]),
        batching=draw([*[Batching.MIXED] * 5, Batching.SEPARATE]),
        fairness=draw([*[Fairness.NONE] * 5, Fairness.TENANT]),
    )
    context_s = draw([0.0, 1e-6])
    model = LinearStepTime(
        base_s=0.01,
        per_token_s=0.0003,
        per_decode_s=0.0001,
        per_context_token_s=context_s,
        variation=draw([(), (0.9, 1.0, 1.1, 2.0)]),
    )
    return Setup(
        name="drawn",
        config=replace(
            config,
            least_prefill_share=draw([0.0, 0.5]),
            large_crowd_prefill_share=draw([0.5, 0.6]),
            prefill_patience_s=draw([0.0, 1.0]),
            uncrowded_itl_s=draw([0.0, 0.1]),
        ),
        step_time=model,
        num_replicas=draw([1, 3]),
        router=draw([RouterKind.LEAST_WAITING, RouterKind.ROUND_ROBIN]),
    )


def drawn_workload(random: Random) -> SyntheticWorkload:
    draw = random.choice
    return SyntheticWorkload(
        num_requests=60,
        rate_per_s=draw([0.3, 2, 5, 20, inf]),
        burstiness=draw([0.2, 1.0]),
        prompt_lens=LengthDistribution.parse(draw(["20", "uniform:1:80"])),
        output_lens=LengthDistribution.parse(draw(["3", "uniform:1:80", "lognormal:60:1:300"])),
        priority_mix=draw([((0, 1.0), (2, 1.0)), ((0, 1.0), (5, 3.0))]),
        tenant_mix=draw([(("", 1.0),), (("a", 1.0), ("b", 2.0))]),
        num_prefix_groups=draw([0, 3]),
        prefix_len=32,
        seed=random.randrange(1000),
    )


def history(result: RunResult) -> dict[str, Any]:
    """Everything that was counted; times between tokens by how often each occurred."""
    facts = asdict(result)
    facts["classes"] = [
        {**asdict(tally), "gaps": sorted(tally.gaps._counts.items())} for tally in result.classes
    ]
    return facts


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch) -> list[Scheduler]:
    """Schedulers of all replicas."""
    made: list[Scheduler] = []
    begin = Scheduler.__init__

    def kept(self: Scheduler, config: SchedulerConfig) -> None:
        begin(self, config)
        made.append(self)

    monkeypatch.setattr(Scheduler, "__init__", kept)
    return made


def blocks(scheduler: Scheduler) -> tuple[Any, ...]:
    """Blocks in the order in which they would be reused, and what they hold."""
    return free_blocks(scheduler.kv.pool), published(scheduler.kv.index.main_cache)


OF_TWO_KINDS = {
    "variation": (0.9, 1.0, 1.2) * 30,
    "computing_shares": (0.7, 0.9) * 45,
    "sizes_s": (0.011, 0.04) * 45,
}
"""Steps of a trace, each second one of which was long."""


@pytest.mark.parametrize("seed", by_day(range(_NUM_HISTORIES), range(12)))
def test_leaping_and_stepping_give_the_same_history(seed: int, schedulers: list[Scheduler]) -> None:
    random = Random(seed)
    setup, workload = drawn_setup(random), drawn_workload(random)
    setup = replace(setup, step_time=replace(setup.step_time, **[{}, OF_TWO_KINDS][seed % 2]))
    slo = Slo(ttft_s=0.3, itl_s=0.02)
    leapt = simulate(workload, setup, slo)
    stepped = simulate(workload, replace(setup, stepping=Stepping.EACH), slo)
    assert history(leapt) == history(stepped)
    ends = [blocks(scheduler) for scheduler in schedulers]
    assert ends[: len(ends) // 2] == ends[len(ends) // 2 :]


@pytest.mark.parametrize("seed", [1, 4])
def test_made_up_keys_find_the_blocks_that_keys_of_the_tokens_find(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    setup, workload = drawn_setup(random), replace(drawn_workload(random), num_prefix_groups=3)
    setup = replace(setup, config=replace(setup.config, prefix_caching=PrefixCaching.ON, num_blocks=60))
    named = simulate(workload, setup)
    assert named.num_prefix_hits
    monkeypatch.setattr(PromptMaker, "block_keys", lambda *_: [])
    monkeypatch.setattr(PromptMaker, "tail_key", lambda *_: None)
    assert history(named) == history(simulate(workload, setup))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Shares of each plan that is made."""
    nums: list[int] = []
    schedule = Scheduler.schedule

    def counted(self: Scheduler, *, now_s: float) -> Any:
        plan = schedule(self, now_s=now_s)
        nums.append(len(plan.scheduled))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", counted)
    return nums


def roomy(**changes: Any) -> Setup:
    setup = drawn_setup(Random(0))
    config = replace(setup.config, num_blocks=9000, max_model_len=4096, batching=Batching.MIXED)
    config = replace(config, fairness=Fairness.NONE, prefix_caching=PrefixCaching.ON, **changes)
    return replace(setup, config=config, num_replicas=1)


def test_a_long_answer_alone_is_leapt_over_with_a_handful_of_plans(planned: list[int]) -> None:
    result = simulate([SimRequest(arrival_s=0.0, prompt_len=20, max_tokens=3000)], roomy())
    assert result.num_steps == 3000
    assert len(planned) < 10


def test_a_plan_holds_little_beside_the_newcomer_that_it_is_made_for(planned: list[int]) -> None:
    """Blocks and ends of the others cost no share of it."""
    requests = [SimRequest(arrival_s=0.31 * n, prompt_len=20, max_tokens=200) for n in range(40)]
    result = simulate(requests, roomy(max_num_seqs=32, max_num_batched_tokens=256))
    assert result.num_steps > 1000
    assert sum(planned) < 2 * len(requests)


def test_the_scheduler_learns_from_the_part_of_a_step_in_which_the_model_computes() -> None:
    setup = roomy(target_itl_s=0.05, max_num_batched_tokens=1024, max_num_seqs=16)
    setup = replace(setup, config=replace(setup.config, max_prefill_tokens=0, max_chunk_tokens=0))
    setups = [
        replace(setup, step_time=replace(setup.step_time, variation=(1.0,), computing_shares=(share,)))
        for share in (1.0, 0.5)
    ]
    requests = [SimRequest(arrival_s=0.4 * n, prompt_len=900, max_tokens=60) for n in range(20)]
    whole, half = (simulate(requests, each) for each in setups)
    assert half.num_steps < 0.95 * whole.num_steps
    assert history(half) == history(simulate(requests, replace(setups[1], stepping=Stepping.EACH)))
