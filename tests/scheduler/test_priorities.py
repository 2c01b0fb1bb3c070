"""Priority that works, and does not starve anybody."""

import pytest

from scheduler.config import Displacement, Fairness, SchedulingPolicy
from scheduler.messages import FinishReason, PreemptionCause, SequenceId, TimeLimits
from scheduler.step.preemption import PROTECTED_TOKENS
from tests.fakes import continuation, make_sequence
from tests.invariants import num_entries
from tests.world import World, shares, small_config


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def priority_world(**changes: object) -> World:
    return World(small_config(policy=SchedulingPolicy.PRIORITY, **changes))


def test_with_all_places_taken_an_urgent_request_runs_in_the_step_after_its_arrival() -> None:
    world = priority_world(max_num_seqs=2, num_blocks=64)
    world.add(*(make_sequence(i, prompt(5, i), max_tokens=40, priority=9) for i in (1, 2)))
    for _ in range(5):
        world.step()
    world.add(make_sequence(3, prompt(5, 3), max_tokens=2, priority=0))
    assert shares(world.step()) == {1: 1, 3: 5}
    assert world.num_preemptions(PreemptionCause.DISPLACED) == 1
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt(5, 2), 40)


def test_with_the_memory_taken_the_newest_of_the_least_urgent_gives_its_blocks() -> None:
    world = priority_world(num_blocks=6)
    for i, priority in ((1, 5), (2, 9), (3, 9)):
        world.add(make_sequence(i, prompt(6, i), max_tokens=2, priority=priority))
    world.step()
    world.add(make_sequence(4, prompt(8, 4), max_tokens=2, priority=0))
    plan = world.step()
    assert SequenceId(3) in plan.released
    assert shares(plan).keys() == {1, 2, 4}


def test_equals_never_send_each_other_away() -> None:
    world = priority_world(max_num_seqs=1)
    world.add(make_sequence(2, prompt(3, 2), max_tokens=9, priority=1))
    world.step()
    world.add(make_sequence(3, prompt(3, 3), priority=1))
    world.step()
    assert world.num_preemptions(PreemptionCause.DISPLACED) == 0


def test_so_many_are_sent_away_as_together_suffice() -> None:
    world = priority_world(num_blocks=8)
    world.add(make_sequence(1, prompt(20, 1), priority=0, max_tokens=2))
    world.add(make_sequence(2, prompt(8, 2), priority=9, max_tokens=3))
    for _ in range(2):
        world.step()
    world.add(make_sequence(3, prompt(24, 3), priority=-1, max_tokens=2))
    world.step()
    assert world.num_preemptions(PreemptionCause.DISPLACED) == 2


def test_nobody_is_sent_away_if_it_would_not_be_enough() -> None:
    world = priority_world(num_blocks=8)
    world.add(make_sequence(1, prompt(16, 1), priority=-1, max_tokens=9))
    world.add(make_sequence(2, prompt(8, 2), priority=9, max_tokens=3))
    for _ in range(2):
        world.step()
    world.add(make_sequence(3, prompt(24, 3), priority=0, max_tokens=2))
    world.step()
    assert world.num_preemptions(PreemptionCause.DISPLACED) == 0


def test_blocks_that_two_victims_share_count_once_both_go() -> None:
    world = priority_world(num_blocks=7)
    shared = prompt(16, 1)
    world.add(*(make_sequence(i, [*shared, 50 + i], priority=9, max_tokens=3) for i in (1, 2)))
    world.step()
    world.add(make_sequence(3, prompt(20, 3), priority=0, max_tokens=2))
    plan = world.step()
    assert shares(plan) == {3: 16}
    world.run()
    assert world.tokens[SequenceId(2)] == continuation([*shared, 52], 3)


def test_an_urgent_prompt_gets_its_chunk_before_a_less_urgent_one_that_is_under_way() -> None:
    world = priority_world(max_num_batched_tokens=8, num_blocks=64)
    world.add(make_sequence(1, prompt(40, 1), priority=9))
    world.step()
    world.add(make_sequence(2, prompt(6, 2), priority=0))
    assert shares(world.step()) == {2: 6, 1: 2}


def test_one_that_was_sent_away_is_left_alone_until_it_has_made_progress() -> None:
    world = priority_world(max_num_seqs=1, num_blocks=64)
    world.add(make_sequence(1, prompt(3, 1), max_tokens=60, priority=9))
    world.step()
    world.add(make_sequence(2, prompt(3, 2), max_tokens=1, priority=0))
    world.step()
    assert world.ended[SequenceId(2)]
    world.step()  # resumed
    world.add(make_sequence(3, prompt(3, 3), max_tokens=1, priority=0))
    num_steps = 0
    while 3 not in world.ended:
        world.step()
        num_steps += 1
    assert num_steps == PROTECTED_TOKENS
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(3, 1), 60)


def test_one_that_was_admitted_in_this_step_is_not_displaced_in_it_again() -> None:
    """Admitting charges a tenant, which brings a still more urgent one of another priority to the front."""
    world = priority_world(priority_aging_s=10.0, fairness=Fairness.TENANT, max_num_seqs=1, num_blocks=30)
    world.now_s = 0.0
    world.add(make_sequence(1, prompt(3, 1), max_tokens=30, priority=50, tenant="c"))
    world.step()
    for number, priority, tenant, now_s in (
        (5, 60, "b", 75.0),  # keeps the account of b open
        (2, 0, "b", 80.0),
        (3, 1, "a", 75.0),
        (4, 0, "a", 90.0),
    ):
        world.now_s = now_s
        world.add(make_sequence(number, prompt(9, number), tenant=tenant, priority=priority))
    world.scheduler._queues.charge(make_sequence(9, [1], tenant="b"), 1.0)
    world.now_s = 101.0
    plan = world.step()  # checks that nobody who was preempted has a share
    assert len(plan.new_sequences) == 1
    world.run()


def test_displacement_can_be_switched_off() -> None:
    world = priority_world(max_num_seqs=1, displacement=Displacement.OFF)
    world.add(make_sequence(1, prompt(3, 1), max_tokens=9, priority=9))
    world.step()
    world.add(make_sequence(2, prompt(3, 2), priority=0))
    world.run()
    assert world.num_preemptions(PreemptionCause.DISPLACED) == 0
    assert list(world.ended) == [1, 2]


def steps_until_served(aging_s: float, priority: int, max_steps: int) -> int | None:
    """Steps that one of `priority` waits under a steady load of priority 0 that fills the only place."""
    world = priority_world(max_num_seqs=1, num_blocks=64, priority_aging_s=aging_s)
    world.add(make_sequence(10_000, prompt(2, 1), max_tokens=1, priority=priority))
    for step in range(max_steps):
        world.add(make_sequence(step, prompt(2, step), max_tokens=1, priority=0))
        world.step()
        if 10_000 in world.ended:
            return step
    return None


def test_strict_priority_starves_and_aging_bounds_the_wait() -> None:
    assert steps_until_served(float("inf"), 5, 300) is None
    for aging_s, priority in ((4.0, 5), (10.0, 3)):
        waited = steps_until_served(aging_s, priority, 300)
        assert waited is not None
        assert waited <= aging_s * priority + 1


def test_a_head_that_does_not_fit_is_passed_by_at_most_so_many() -> None:
    world = World(small_config(num_blocks=8, max_bypasses=2, max_num_seqs=8))
    world.add(make_sequence(1, prompt(20, 1), max_tokens=9))
    world.step()
    world.step()
    world.add(make_sequence(2, prompt(16, 2), max_tokens=1))
    world.add(*(make_sequence(i, prompt(2, i), max_tokens=1) for i in range(3, 8)))
    world.run()
    order = list(world.ended)
    assert order.index(2) == 3, "1 and the two that passed it came before"
    assert order[:2] == [3, 4]


def test_a_newcomer_that_fits_is_seen_although_as_many_wait_as_before() -> None:
    """A line in which none fits is remembered as such until a deciding fact changes."""
    world = World(small_config(num_blocks=8, block_size=8, max_bypasses=5))
    world.add(make_sequence(1, prompt(41, 1), max_tokens=9))
    world.step()
    world.add(make_sequence(2, prompt(40, 2), max_tokens=1), make_sequence(3, prompt(39, 3), max_tokens=1))
    for _ in range(3):
        world.step()
    world.abort(3)
    world.add(make_sequence(4, prompt(3, 4), max_tokens=1))
    world.step()
    assert 4 in world.ended


def test_without_bypasses_the_order_is_strict() -> None:
    world = World(small_config(num_blocks=8, max_bypasses=0))
    world.add(make_sequence(1, prompt(20, 1), max_tokens=9))
    world.step()
    world.step()
    world.add(make_sequence(2, prompt(16, 2), max_tokens=1), make_sequence(3, prompt(2, 3), max_tokens=1))
    world.run()
    assert list(world.ended) == [1, 2, 3]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (TimeLimits(queue_s=2.0), 2.0),
        (TimeLimits(first_token_s=3.0), 3.0),
        (TimeLimits(total_s=4.0, queue_s=9.0), 4.0),
    ],
)
def test_one_that_waits_too_long_is_dropped_before_it_costs_a_step(
    limits: TimeLimits, expected: float
) -> None:
    world = World(small_config(max_num_seqs=1))
    world.add(make_sequence(1, prompt(3, 1), max_tokens=20))
    world.step()
    world.now_s = 0.0
    world.add(make_sequence(2, prompt(3, 2), time_limits=limits))
    while 2 not in world.ended:
        assert world.now_s <= expected
        world.step()
    assert world.now_s == expected + 1
    assert world.reason(2) is FinishReason.EXPIRED
    assert world.tokens[SequenceId(2)] == []
    assert all(share.sequence_id != 2 for plan in world.worker.plans for share in plan.scheduled)


def test_one_that_runs_too_long_returns_what_it_has() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(3, 1), max_tokens=20, time_limits=TimeLimits(total_s=5.0)))
    world.run()
    assert world.reason(1) is FinishReason.EXPIRED
    assert world.tokens[SequenceId(1)] == continuation(prompt(3, 1), 5)
    assert world.scheduler.kv.pool.num_used == 0


def test_limits_that_were_kept_do_not_end_a_sequence_later() -> None:
    world = World(small_config())
    limits = TimeLimits(queue_s=1.0, first_token_s=2.0, total_s=50.0)
    world.add(make_sequence(1, prompt(3, 1), max_tokens=12, time_limits=limits))
    world.run()
    assert world.reason(1) is FinishReason.LENGTH


def test_deadlines_of_ended_sequences_do_not_pile_up() -> None:
    world = World(small_config())
    for i in range(2000):
        world.add(make_sequence(i, [1], max_tokens=1, time_limits=TimeLimits(total_s=1e9)))
        world.step()
    assert num_entries(world.scheduler._deadlines) < 100
    assert not world.scheduler._deadlines._live, "their prompts would stay in memory"


def test_no_end_pays_for_the_deadlines_of_all_who_ended_before() -> None:
    world = World(small_config())
    deadlines = world.scheduler._deadlines
    for i in range(1000):
        world.add(make_sequence(i, [1], max_tokens=1, time_limits=TimeLimits(total_s=1e9 + i % 7)))
    most = 0
    for i in range(1000):
        before = num_entries(deadlines)
        world.scheduler.finish_requests([SequenceId(i)], FinishReason.ABORTED)
        most = max(most, before - num_entries(deadlines))
    assert most <= 4
    assert num_entries(deadlines) < 100


def test_aborting_among_many_who_wait_keeps_the_queue_small() -> None:
    world = World(small_config(max_num_seqs=1))
    world.add(make_sequence(0, [1], max_tokens=60))
    world.step()
    for i in range(1, 500):
        world.scheduler.add_request(make_sequence(i, [1]), now_s=0.0)
    for i in range(1, 500):
        world.scheduler.finish_requests([SequenceId(i)], FinishReason.ABORTED)
    assert world.scheduler.get_request_counts() == (1, 0, 0)
    assert num_entries(world.scheduler._queues.waiting) < 100


@pytest.mark.parametrize("priority", [0, 9])
def test_in_order_of_arrival_the_cheapest_victim_is_chosen_whatever_priorities_requests_have(
    priority: int,
) -> None:
    world = World(small_config(num_blocks=6, max_num_batched_tokens=32))
    world.add(make_sequence(1, prompt(8, 1), max_tokens=9))
    world.add(make_sequence(2, prompt(3, 2), max_tokens=9))
    world.add(make_sequence(3, prompt(9, 3), max_tokens=9, priority=priority))
    world.step()
    assert [preemption.sequence_id for preemption in world.step().preemptions] == [2]


def test_a_small_one_is_found_behind_any_number_that_do_not_fit() -> None:
    world = World(small_config(num_blocks=8, max_bypasses=2, max_num_seqs=8))
    world.add(make_sequence(1, prompt(20, 1), max_tokens=9))
    world.step()
    world.step()
    world.add(*(make_sequence(i, prompt(16, i), max_tokens=1) for i in range(2, 42)))
    world.add(make_sequence(50, prompt(2, 3), max_tokens=1))
    world.step()
    assert 50 in world.ended


def test_no_single_abort_among_many_pays_for_the_others() -> None:
    world = World(small_config(max_num_seqs=1, max_bypasses=2))
    world.add(make_sequence(0, [1], max_tokens=60))
    world.step()
    for number in range(1, 3000):
        world.scheduler.add_request(make_sequence(number, [1]), now_s=0.0)
    waiting = world.scheduler._queues.waiting
    for number in range(1, 3000):
        before = num_entries(waiting)
        world.scheduler.finish_requests([SequenceId(number)], FinishReason.ABORTED)
        assert before - num_entries(waiting) < 10
        assert num_entries(waiting) <= 2 * len(waiting) + 200 or number < 2900
    assert num_entries(waiting) < 200
