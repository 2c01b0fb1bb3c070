"""Sequences with a grammar, which the worker compiles: so few come into a step that nobody waits for long."""

from dataclasses import replace

import pytest

from scheduler.config import Batching, Fairness, PreemptionMode, SchedulingPolicy
from scheduler.messages import (
    Grammar,
    GrammarKind,
    Page,
    PreemptionCause,
    SchedulerOutput,
    SequenceId,
    WaitReason,
)
from scheduler.sequence import Sequence
from tests.fakes import continuation, make_sequence
from tests.world import World, shares, small_config

# Four of these may be compiled in a step.
GRAMMAR = Grammar(kind=GrammarKind.REGEX, text="[ab]+", cost_s=0.003)
ONE_S, TWO_S = 0.003, 0.006
DEAR = replace(GRAMMAR, cost_s=0.05)
CHEAP = replace(GRAMMAR, cost_s=0.0012)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def bound(number: int, **changes: object) -> Sequence:
    """To a grammar."""
    return make_sequence(number, prompt(2, number), **({"grammar": GRAMMAR, "max_tokens": 30} | changes))


def free(number: int, **changes: object) -> Sequence:
    return make_sequence(number, prompt(2, number), **({"max_tokens": 30} | changes))


def roomy(**changes: object) -> World:
    settings = {"num_blocks": 999, "max_num_seqs": 300, "max_num_batched_tokens": 2000, "max_bypasses": 32}
    return World(small_config(**(settings | changes)))


def admitted(plan: SchedulerOutput) -> list[int]:
    return [new.sequence_id for new in plan.new_sequences]


def num_grammars(plan: SchedulerOutput) -> int:
    return sum(new.params.grammar is not None for new in plan.new_sequences)


def test_a_crowd_comes_in_four_by_four_and_in_order_and_all_end() -> None:
    world = roomy()
    world.add(*(bound(i, max_tokens=3) for i in range(1, 23)))
    world.run()
    admissions = [admitted(plan) for plan in world.worker.plans if plan.new_sequences]
    assert admissions == [[*range(first, min(first + 4, 23))] for first in range(1, 23, 4)]
    for i in range(1, 23):
        assert world.tokens[SequenceId(i)] == continuation(prompt(2, i), 3)


def test_the_siblings_of_one_request_come_in_four_by_four_too() -> None:
    world = roomy()
    world.add(*(make_sequence(i, prompt(9), grammar=GRAMMAR, max_tokens=2) for i in range(128)))
    assert world.run() <= 128 // 4 + 2
    assert max(num_grammars(plan) for plan in world.worker.plans) == 4


def test_what_takes_long_to_compile_comes_in_one_by_one_and_what_does_not_many_at_once() -> None:
    world = roomy(max_bypasses=0)
    world.add(*(bound(i, grammar=DEAR, max_tokens=2) for i in (1, 2)))
    world.add(*(bound(i, grammar=CHEAP, max_tokens=2) for i in range(3, 43)))
    world.run()
    admissions = [admitted(plan) for plan in world.worker.plans if plan.new_sequences]
    assert admissions == [[1], [2], *([*range(first, first + 10)] for first in range(3, 43, 10))]


def test_a_grammar_of_which_no_cost_is_known_has_one() -> None:
    world = roomy()
    world.add(*(bound(i, grammar=replace(GRAMMAR, cost_s=0.0), max_tokens=2) for i in range(1, 99)))
    assert len(admitted(world.step())) <= 12
    world.run()


def test_a_cheap_one_may_pass_a_dear_one_that_stands_first_in_the_next_step() -> None:
    world = roomy()
    world.add(bound(1), bound(2, grammar=DEAR), bound(3, grammar=CHEAP), bound(4, grammar=CHEAP))
    assert admitted(world.step()) == [1, 3, 4]
    assert admitted(world.step()) == [2]
    world.run()


def test_whoever_runs_has_a_token_of_every_step_meanwhile() -> None:
    world = roomy()
    world.add(*(free(i) for i in (1, 2)))
    world.step()
    world.add(*(bound(i) for i in range(3, 43)))
    for _ in range(10):
        plan = world.step()
        assert num_grammars(plan) == 4
        assert shares(plan)[1] == shares(plan)[2] == 1
    world.run()


def test_the_one_that_waits_stands_first_in_the_next_step_and_the_reason_is_told() -> None:
    world = roomy(max_grammar_s=ONE_S)
    world.add(bound(1), bound(2), bound(3))
    assert admitted(world.step()) == [1]
    stats = world.scheduler.stats()
    assert (stats.wait_reason, stats.num_waiting) == (WaitReason.GRAMMAR, 2)
    waiting = [
        report for report in world.scheduler.report(Page(0, 9), now_s=0.0) if report.state == "waiting"
    ]
    assert [report.wait_reason for report in waiting] == ["grammar"] * 2
    world.add(bound(4))
    assert [admitted(world.step()) for _ in range(3)] == [[2], [3], [4]]
    assert world.scheduler.stats().wait_reason is WaitReason.STEP
    world.run()


def test_others_pass_in_the_same_step_and_need_no_grammar() -> None:
    world = roomy(max_grammar_s=TWO_S)
    world.add(*(bound(i) for i in (1, 2, 3, 4)), free(5), bound(6), free(7))
    assert admitted(world.step()) == [1, 2, 5, 7]
    assert admitted(world.step()) == [3, 4]
    assert admitted(world.step()) == [6]
    world.run()


def test_so_many_pass_as_may_pass_one_that_waits_for_blocks() -> None:
    world = roomy(max_grammar_s=ONE_S, max_bypasses=2)
    world.add(bound(1), bound(2), *(free(i) for i in (3, 4, 5)))
    assert admitted(world.step()) == [1, 3, 4]
    assert admitted(world.step()) == [2, 5]
    world.run()


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_those_who_come_back_count_as_those_who_are_new(mode: PreemptionMode) -> None:
    world = roomy(num_blocks=8, max_num_seqs=8, max_grammar_s=TWO_S, preemption_mode=mode, num_host_blocks=40)
    world.add(*(bound(i, max_tokens=20) for i in range(1, 6)))
    world.run()
    assert world.num_preemptions(PreemptionCause.GROWTH) >= 2
    assert bool(world.num_swaps()) == (mode is PreemptionMode.SWAP)
    assert max(num_grammars(plan) for plan in world.worker.plans) == 2
    for i in range(1, 6):
        assert world.tokens[SequenceId(i)] == continuation(prompt(2, i), 20)


def test_an_urgent_one_sends_nobody_away_in_a_step_that_cannot_take_its_grammar() -> None:
    world = roomy(max_num_seqs=3, max_grammar_s=ONE_S, policy=SchedulingPolicy.PRIORITY)
    world.add(*(free(i, priority=5) for i in (1, 2, 3)))
    world.step()
    world.add(*(bound(i, priority=0) for i in (4, 5)))
    assert admitted(world.step()) == [4]
    assert world.num_preemptions() == 1
    assert admitted(world.step()) == [5]
    assert world.num_preemptions() == 2
    world.run()


def test_one_passed_over_behind_a_stuck_head_is_looked_at_again() -> None:
    world = roomy(num_blocks=9, max_grammar_s=ONE_S, max_bypasses=5)
    world.add(make_sequence(1, prompt(13, 1), max_tokens=9))
    world.step()
    world.add(make_sequence(2, prompt(30, 2)))
    world.add(bound(3, max_tokens=9), bound(4, max_tokens=9))
    assert [admitted(world.step()), admitted(world.step())] == [[3], [4]]
    world.run()


def test_each_tenant_has_its_turn_at_grammars() -> None:
    world = roomy(max_grammar_s=ONE_S, fairness=Fairness.TENANT)
    world.add(*(bound(i, tenant="crowd") for i in range(1, 9)), bound(9, tenant="alone"))
    assert 9 in admitted(world.step()) + admitted(world.step())
    world.run()


def test_separate_batches_let_decodes_go_on_between_two_groups_of_grammars() -> None:
    world = roomy(batching=Batching.SEPARATE)
    world.add(free(1))
    world.step()
    world.add(*(bound(i) for i in range(2, 42)))
    plans = [world.step() for _ in range(20)]
    assert [num_grammars(plan) for plan in plans] == [4, 0] * 10
    assert [1 in shares(plan) for plan in plans] == [False, True] * 10
    world.run()
