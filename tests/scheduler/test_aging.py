"""Aging and displacement together: urgent requests are served soon, and nobody starves."""

from math import inf

import pytest

from scheduler.config import Fairness, SchedulingPolicy
from scheduler.messages import SequenceId
from scheduler.step.preemption import PROTECTED_TOKENS
from tests.fakes import continuation, make_sequence
from tests.world import World, shares, small_config


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def aging_world(aging_s: float, **changes: object) -> World:
    return World(
        small_config(
            policy=SchedulingPolicy.PRIORITY,
            priority_aging_s=aging_s,
            **({"num_blocks": 200, "max_num_seqs": 1, "max_model_len": 400} | changes),
        )
    )


@pytest.mark.parametrize("fairness", Fairness)
def test_one_that_runs_is_displaced_however_long_ago_it_was_added(fairness: Fairness) -> None:
    world = aging_world(1.0, fairness=fairness)
    world.add(make_sequence(1, prompt(3, 1), max_tokens=300, priority=9))
    for _ in range(100):
        world.step()
    world.add(make_sequence(2, prompt(3, 2), max_tokens=2, priority=0))
    assert shares(world.step()) == {2: 3}
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(3, 1), 300)


@pytest.mark.parametrize("fairness", Fairness)
def test_an_old_one_at_the_head_of_the_queue_does_not_stop_an_urgent_one_behind_it(
    fairness: Fairness,
) -> None:
    world = aging_world(1.0, fairness=fairness)
    world.add(*(make_sequence(i, prompt(3, i), max_tokens=300, priority=9) for i in (1, 2)))
    for _ in range(100):
        world.step()
    world.add(make_sequence(3, prompt(3, 3), max_tokens=2, priority=0))
    assert shares(world.step()) == {3: 3}


def test_what_is_free_is_kept_for_an_old_one_and_urgent_ones_take_from_running_ones_only() -> None:
    world = aging_world(1.0, max_num_seqs=4, num_blocks=12)
    world.add(make_sequence(1, prompt(20, 1), max_tokens=60, priority=9))
    world.step()
    world.step()
    world.add(make_sequence(2, prompt(40, 2), max_tokens=2, priority=9))  # its blocks are too few so far
    world.now_s = 90.0
    world.step()
    world.add(make_sequence(3, prompt(20, 3), max_tokens=9, priority=0))
    plan = world.step()
    assert [preemption.sequence_id for preemption in plan.preemptions] == [1]
    world.add(make_sequence(4, prompt(2, 4), max_tokens=9, priority=0))
    assert 4 not in shares(world.step()), "it would take what the old one waits for"


def test_a_long_prompt_that_came_first_by_age_goes_on_beside_urgent_ones_that_keep_coming() -> None:
    world = aging_world(1.0, max_num_seqs=4)
    world.add(make_sequence(1, prompt(100, 1), max_tokens=1, priority=9))
    world.step()
    for number in range(2, 150):
        world.add(make_sequence(number, prompt(16, number), max_tokens=1, priority=0))
        world.step()
    assert 1 in world.ended


def test_many_that_have_grown_old_together_do_not_have_their_turns_in_a_row() -> None:
    world = aging_world(30.0)
    for number in range(1, 11):
        world.add(make_sequence(number, prompt(5, number), max_tokens=48, priority=1))
    starts: dict[int, int] = {}
    for step in range(300):
        if step > 40 and step % 3 == 0:
            world.add(make_sequence(100 + step, prompt(4, step), max_tokens=1))
        for number in shares(world.step()):
            starts.setdefault(number, step)
    waited = [start - (number - 100) for number, start in starts.items() if number > 100]
    assert len(waited) > 80, "all but the last have been served"
    assert max(waited) <= PROTECTED_TOKENS + 8


@pytest.mark.parametrize("num_steps", range(2, 7))
def test_blocks_are_kept_for_an_old_one_some_of_whose_tokens_are_still_being_sampled(num_steps: int) -> None:
    world = aging_world(1.0, max_num_seqs=2, max_plans_in_flight=3)
    for number in (1, 2):
        world.add(make_sequence(number, prompt(3, number), max_tokens=40, priority=9))
    for _ in range(num_steps):
        world.step()
    world.now_s = 100.0
    world.add(*(make_sequence(number, prompt(3, number), max_tokens=2) for number in (3, 4)))
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(3, 1), 40)


@pytest.mark.parametrize(("aging_s", "levels"), [(2.0, 5), (5.0, 9), (10.0, 1)])
def test_without_a_pause_in_urgent_work_a_low_one_is_served_once_it_is_old_enough(
    aging_s: float, levels: int
) -> None:
    world = aging_world(aging_s)
    world.add(make_sequence(1, prompt(2, 1), max_tokens=3 * PROTECTED_TOKENS, priority=levels))
    first_token_step = inf
    for step in range(600):
        world.add(make_sequence(100 + step, prompt(2, step), max_tokens=1, priority=0))
        world.step()
        if world.tokens[SequenceId(1)]:
            first_token_step = min(first_token_step, step)
        if 1 in world.ended:
            break
    assert first_token_step <= aging_s * levels + 3
    assert world.tokens[SequenceId(1)] == continuation(prompt(2, 1), 3 * PROTECTED_TOKENS)
