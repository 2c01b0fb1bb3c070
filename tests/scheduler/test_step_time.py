"""Steps that keep their pace, chunks that leave room, and a scheduler that never hangs."""

from random import Random

import pytest

from scheduler.config import Batching, Fairness, PrefixCaching, SchedulingPolicy
from scheduler.messages import FinishReason, ReportPage, SequenceId, TimeLimits, WaitReason
from scheduler.step.step_time import StepTimeModel
from tests.fakes import continuation, make_sequence
from tests.world import World, shares, small_config


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def test_the_line_is_found_in_noisy_steps_and_followed_when_it_changes() -> None:
    model, random = StepTimeModel(), Random(1)
    for base_s, slope_s in ((0.010, 0.0002), (0.020, 0.0004)):
        for _ in range(400):
            num_tokens = random.choice([8, 8, 8, 64, 200, 512])
            model.observe(num_tokens, (base_s + slope_s * num_tokens) * random.uniform(0.95, 1.05))
        assert model.slope_s == pytest.approx(slope_s, rel=0.1)
        assert model.base_s == pytest.approx(base_s, rel=0.25)
    assert model.tokens_within(0.100) == pytest.approx(200, rel=0.1)


def test_steps_of_one_size_tell_nothing_about_the_slope_and_do_not_spoil_it() -> None:
    model = StepTimeModel()
    for _ in range(20):
        model.observe(8, 0.01)
    assert model.tokens_within(0.1) is None
    for num_tokens in (8, 100, 8, 200, 8, 300):
        model.observe(num_tokens, 0.01 + 0.001 * num_tokens)
    slope_s = model.slope_s
    assert slope_s == pytest.approx(0.001, rel=0.05)
    for _ in range(500):
        model.observe(8, 0.018)
    assert model.slope_s == pytest.approx(slope_s, rel=0.2)


def test_one_slow_step_does_not_spoil_the_slope_for_good() -> None:
    model = StepTimeModel()
    for num_tokens in (8, 100, 8, 200, 8, 300, 8, 500):
        model.observe(num_tokens, 0.005 + 0.00002 * num_tokens)
    model.observe(512, 3.0)  # a page-in, a noisy neighbour
    for _ in range(300):
        num_tokens = min(model.tokens_within(0.05) or 2048, 2048)
        model.observe(num_tokens, 0.005 + 0.00002 * num_tokens)
    assert (model.tokens_within(0.05) or 0) > 1500


def test_one_pause_in_a_hundred_is_longer_than_headroom_lets_expect() -> None:
    model, random = StepTimeModel(), Random(1)
    num_slow = 0
    for number in range(6000):
        num_tokens = 8 if number % 2 else random.randrange(30, 50)
        took_s = (0.01 + 0.001 * num_tokens) * random.lognormvariate(0, 0.1)
        if number % 2:
            model.observe(num_tokens, took_s)
            continue
        if number >= 2000:
            num_slow += took_s > model.headroom * model.seconds(num_tokens)
        model.observe(num_tokens, took_s, has_prefill=True, pause_s=took_s)
    assert 0.005 * 2000 < num_slow < 0.015 * 2000
    assert 1.1 < model.headroom < 1.5


def test_headroom_that_is_not_used_is_given_back_and_one_accident_takes_little_of_it() -> None:
    model = StepTimeModel()

    def observe_steps(num: int, *, pause_s: float = 0.0) -> None:
        for num_tokens in (8, 40) * num:
            took_s = 0.01 + 0.001 * num_tokens
            model.observe(num_tokens, took_s)
            if num_tokens == 40:
                model.observe(num_tokens, took_s, has_prefill=True, pause_s=pause_s or took_s)

    observe_steps(1000)
    assert model.headroom == 1.0
    observe_steps(1, pause_s=3.0)
    assert 1.0 < model.headroom < 1.05


def test_with_a_target_decodes_keep_their_pace_while_a_long_prompt_goes_on() -> None:
    def longest_step(target_itl_s: float) -> tuple[float, int]:
        """Longest step with a decode in it, after the model had time to learn; and when all was done."""
        world = World(
            small_config(
                num_blocks=800,
                max_num_batched_tokens=512,
                max_model_len=2048,
                target_itl_s=target_itl_s,
                max_num_seqs=8,
            )
        )
        longest_s = 0.0
        for number in range(12):
            world.add(make_sequence(number, prompt(500 - 30 * number, number), max_tokens=60))
            for _ in range(6):
                plan = world.step()  # World tells 0.05 s for each token
                if number > 3 and any(share.num_tokens == 1 for share in plan.scheduled):
                    longest_s = max(longest_s, plan.num_scheduled_tokens * 0.05)
        return longest_s, world.run()

    assert longest_step(float("inf"))[0] > 20.0
    assert longest_step(2.0)[0] <= 2.0 + 0.05 * 16


def test_prefill_goes_on_even_if_the_target_leaves_nothing() -> None:
    world = World(small_config(num_blocks=200, max_num_batched_tokens=64, target_itl_s=0.0001))
    world.add(*(make_sequence(i, prompt(3 + 5 * i, i), max_tokens=30) for i in range(4)))
    world.run()
    assert world.tokens[SequenceId(3)] == continuation(prompt(18, 3), 30)


def test_a_prompt_gets_sixteen_tokens_of_each_step_however_long_decodes_take() -> None:
    world = World(
        small_config(num_blocks=64, max_num_batched_tokens=64, max_model_len=99, target_itl_s=0.0001)
    )
    world.add(make_sequence(1, prompt(3, 1), max_tokens=60))
    for _ in range(12):
        world.step()
    world.add(make_sequence(2, prompt(64, 2)))
    assert [shares(world.step()) for _ in range(5)] == [*[{1: 1, 2: 16}] * 4, {1: 1, 2: 1}]


def test_a_sequence_that_was_preempted_after_its_first_token_has_not_waited_for_it_since_it_came() -> None:
    world = World(
        small_config(
            num_blocks=999,
            max_num_batched_tokens=512,
            max_model_len=400,
            max_num_seqs=25,
            policy=SchedulingPolicy.PRIORITY,
            prefix_caching=PrefixCaching.OFF,
            target_itl_s=2.0,
            least_prefill_share=0.5,
            large_crowd_prefill_share=0.5,
            prefill_patience_s=4.0,
        )
    )
    world.add(*(make_sequence(i, prompt(3, i), max_tokens=300) for i in range(24)))
    for _ in range(9):
        world.step()
    world.add(make_sequence(24, prompt(90), max_tokens=50, priority=9))
    first, *_, late = (shares(world.step())[24] for _ in range(5))
    assert first < late, "it waits for its first token"
    while not world.tokens[SequenceId(24)]:
        world.step()
    world.add(make_sequence(25, prompt(2), max_tokens=1))
    assert 24 not in shares(world.step())
    assert shares(world.step())[24] == first


def test_one_long_prompt_leaves_tokens_of_the_step_to_a_short_one_behind_it() -> None:
    world = World(small_config(num_blocks=64, max_num_batched_tokens=16, max_chunk_tokens=10))
    world.add(make_sequence(1, prompt(40, 1)), make_sequence(2, prompt(4, 2)))
    assert shares(world.step()) == {1: 10, 2: 4}


def test_a_long_prompt_that_is_alone_gets_the_whole_step() -> None:
    world = World(small_config(num_blocks=64, max_num_batched_tokens=16, max_chunk_tokens=10))
    world.add(make_sequence(1, prompt(40, 1)))
    assert shares(world.step()) == {1: 16}


def test_a_scheduler_that_finds_no_way_fails_one_request_and_serves_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(30, 1)), make_sequence(2, prompt(3, 2)))
    honest = world.scheduler.kv.demand
    monkeypatch.setattr(  # a fault is planted: nobody knows a real one
        world.scheduler.kv,
        "demand",
        lambda seq: honest(seq)._replace(num_from_free=100 if seq.sequence_id == 1 else 0),
    )
    world.run(max_steps=20)
    assert world.reason(1) is FinishReason.FAILED
    assert world.tokens[SequenceId(2)] == continuation(prompt(3, 2), 4)
    assert world.scheduler.stats().num_stalls == 1


def test_every_live_sequence_can_be_explained() -> None:
    world = World(small_config(max_num_seqs=2))
    world.add(*(make_sequence(i, prompt(5, i), max_tokens=9, tenant=f"t{i}") for i in (1, 2, 3, 4)))
    world.step()
    reports = world.scheduler.report(ReportPage(0, 9), now_s=world.now_s)
    assert [(r.sequence_id, r.state, r.place, r.wait_reason) for r in reports] == [
        (1, "running", 0, ""),
        (2, "running", 1, ""),
        (3, "waiting", 0, "places"),
        (4, "waiting", 1, "places"),
    ]
    assert reports[0].num_blocks == 2
    assert reports[0].num_output_tokens == 1
    assert reports[2].age_s == 1.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_num_seqs": 1}, WaitReason.PLACES),
        ({"num_blocks": 3}, WaitReason.BLOCKS),
        ({"max_num_batched_tokens": 9}, WaitReason.TOKENS),
    ],
)
def test_the_reason_for_waiting_is_told(changes: dict[str, int], reason: WaitReason) -> None:
    world = World(small_config(**changes))
    world.add(make_sequence(1, prompt(9, 1)), make_sequence(2, prompt(9, 2)))
    world.step()
    assert world.scheduler.stats().wait_reason is reason


def kinds(world: World) -> list[str]:
    """Contents of each step."""
    names = {(True, False): "decode", (False, True): "prefill", (True, True): "mixed"}
    return [
        names[any(s.num_tokens == 1 for s in plan.scheduled), any(s.num_tokens > 1 for s in plan.scheduled)]
        for plan in world.worker.plans
    ]


def test_separate_batching_never_mixes_and_prefers_prefill() -> None:
    world = World(small_config(batching=Batching.SEPARATE, num_blocks=64, max_num_batched_tokens=8))
    world.add(make_sequence(1, prompt(12, 1), max_tokens=5))
    for _ in range(3):
        world.step()
    world.add(make_sequence(2, prompt(12, 2), max_tokens=3))
    world.run()
    assert kinds(world) == ["prefill", "prefill", "decode", "prefill", "prefill", *["decode"] * 3]
    assert world.tokens[SequenceId(1)] == continuation(prompt(12, 1), 5)


def test_while_the_delay_holds_prompts_back_that_is_their_reason() -> None:
    world = World(
        small_config(batching=Batching.SEPARATE, num_blocks=64, prefill_delay_factor=3.0, max_num_seqs=2)
    )
    world.add(make_sequence(1, prompt(12, 1), max_tokens=20))
    world.step()
    world.add(make_sequence(2, prompt(5, 2), max_tokens=20), make_sequence(3, prompt(5, 3), max_tokens=1))
    reasons = []
    for _ in range(4):
        world.step()  # a second each, and the prefill took 12 * 0.05
        last = world.scheduler.report(ReportPage(0, 9), now_s=0.0)[-1]
        reasons.append((world.scheduler.stats().wait_reason, last.wait_reason))
    assert reasons[0] == (WaitReason.DELAY, WaitReason.DELAY)
    assert reasons[-1] == (WaitReason.PLACES, WaitReason.PLACES)


def test_the_delay_factor_lets_decodes_go_on_until_the_newcomer_has_waited() -> None:
    def steps_before_admission(factor: float) -> int:
        world = World(
            small_config(
                batching=Batching.SEPARATE, num_blocks=64, prefill_delay_factor=factor, max_model_len=99
            )
        )
        world.add(make_sequence(1, prompt(12, 1), max_tokens=40))  # its prefill took 12 * 0.05 s
        world.step()
        world.add(make_sequence(2, prompt(5, 2), max_tokens=1))
        num_steps = 0
        while 2 not in world.ended:
            world.step()  # a second each
            num_steps += 1
        return num_steps

    assert steps_before_admission(0.0) == 1
    assert steps_before_admission(10.0) == 8, "after more than 10 * 0.6 s"


def test_each_waiting_sequence_has_an_expected_start_by_the_pace_of_the_last_ones() -> None:
    world = World(small_config(max_num_seqs=1))
    world.add(*(make_sequence(i, prompt(4, i), max_tokens=3) for i in range(9)))
    while len(world.ended) < 5:
        world.step()
    now_s = world.now_s
    reports = world.scheduler.report(ReportPage(0, 9), now_s=now_s)
    starts = [report.expected_start_s for report in reports if report.state == "waiting"]
    assert starts == pytest.approx([3.0 * (place + 1) for place in range(len(starts))], rel=0.3)


def test_each_waiting_sequence_has_a_reason_of_its_own() -> None:
    world = World(small_config(num_blocks=8, max_num_seqs=8, max_bypasses=0))
    world.add(make_sequence(1, prompt(20, 1), max_tokens=9), make_sequence(2, prompt(3, 2), max_tokens=2))
    world.step()
    world.step()
    world.add(*(make_sequence(i, prompt(size, i)) for i, size in ((3, 28), (4, 28), (5, 2))))
    world.step()
    reports = {report.sequence_id: report for report in world.scheduler.report(ReportPage(0, 9), now_s=8.0)}
    assert [reports[SequenceId(i)].wait_reason for i in (3, 4, 5)] == ["blocks", "blocks", "order"]
    assert reports[SequenceId(3)].expected_start_s is None, "nothing waited when the others began"


@pytest.mark.parametrize("fairness", Fairness)
def test_a_page_of_reports_looks_at_no_more_of_the_queue_than_it_shows(fairness: Fairness) -> None:
    world = World(small_config(max_num_seqs=2, fairness=fairness))
    world.add(*(make_sequence(i, [1], max_tokens=9, tenant=f"t{i % 3}") for i in range(300)))
    world.step()
    world.abort(4, 5, 6)
    shown = [
        seq.sequence_id
        for report in (0, 4)
        for seq in world.scheduler.report(ReportPage(report, 4), now_s=1.0)
    ]
    assert shown == [0, 1, 2, 3, 7, 8, 9, 10]
    assert len(world.scheduler.report(ReportPage(290, 50), now_s=1.0)) == 7
    waiting = world.scheduler._queues.waiting
    in_order = [waiting.peek(), *waiting.after_first(2)]
    assert [seq.sequence_id for seq in in_order] == [2, 3, 7]


@pytest.mark.parametrize("fairness", Fairness)
def test_a_far_page_is_that_of_its_beginning_whatever_changes_before_it_is_found(fairness: Fairness) -> None:
    world = World(small_config(max_num_seqs=2, fairness=fairness))
    world.add(*(make_sequence(i, [1], max_tokens=9, tenant=f"t{i % 3}") for i in range(60)))
    world.step()
    reports = world.scheduler.reports(ReportPage(42, 4), now_s=1.0)
    looked_at = [next(reports) for _ in range(20)]
    assert not any(looked_at), "places before the page"
    world.abort(0, 1, 30, 43)
    world.add(*(make_sequence(i, [1], tenant="t0") for i in range(60, 200)))
    world.step()
    rest = list(reports)
    assert [report.sequence_id for report in rest if report] == [44, 45, 46, 47]
    assert [report.place for report in rest if report] == [40, 41, 42, 43]
    assert len(looked_at) + len(rest) <= 46 + 2, "no more than those before it, and entries of some that left"


@pytest.mark.parametrize(("limit_s", "is_computed"), [(2.0, False), (60.0, True)])
def test_a_prompt_that_cannot_be_computed_within_its_limit_is_not_begun(
    limit_s: float, is_computed: bool
) -> None:
    world = World(small_config(num_blocks=40, max_model_len=160))
    world.add(make_sequence(1, prompt(60, 1), max_tokens=20))
    for _ in range(12):  # a token takes 0.05 s
        world.step()
    world.add(make_sequence(2, prompt(80, 2), max_tokens=1, time_limits=TimeLimits(first_token_s=limit_s)))
    world.step()
    assert any(share.sequence_id == 2 for share in world.worker.plans[-1].scheduled) == is_computed
    if not is_computed:
        assert world.reason(2) is FinishReason.EXPIRED
        assert "its time limit" in world.ended[SequenceId(2)].message
