"""Sequences whose grammar is compiled beside the steps: they wait for it, and for them nobody does."""

from dataclasses import replace
from operator import itemgetter

import pytest

from scheduler.config import Batching, Displacement, Fairness, SchedulingPolicy
from scheduler.messages import (
    FinishReason,
    Grammar,
    GrammarKind,
    PreemptionCause,
    ReportPage,
    SchedulerOutput,
    SequenceId,
    TimeLimits,
    WaitReason,
)
from scheduler.sequence import Sequence
from scheduler.step.admission import Admission
from scheduler.step.budget import SchedulingBudget
from tests.fakes import continuation, make_sequence
from tests.world import World, shares, small_config

GRAMMAR = Grammar(kind=GrammarKind.REGEX, text="[ab]+", cost_s=0.003)
DEAR = replace(GRAMMAR, cost_s=0.05)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def bound(number: int, **changes: object) -> Sequence:
    """To a grammar."""
    return make_sequence(number, prompt(2, number), **({"grammar": GRAMMAR, "max_tokens": 30} | changes))


def free(number: int, **changes: object) -> Sequence:
    return make_sequence(number, prompt(2, number), **({"max_tokens": 30} | changes))


def admitted(plan: SchedulerOutput) -> list[int]:
    return [new.sequence_id for new in plan.new_sequences]


FOUR_S = 0.012


def roomy(compile_steps: int = 3, **changes: object) -> World:
    settings: dict[str, object] = {"num_blocks": 999, "max_num_seqs": 300, "max_num_batched_tokens": 2000}
    settings |= {"max_bypasses": 2, "max_compiling_s": FOUR_S}
    return World(small_config(**(settings | changes)), compile_steps=compile_steps)


def admission_steps(world: World) -> dict[int, int]:
    """Number of the step that each sequence was admitted to."""
    return {i: plan.step for plan in world.worker.plans for i in admitted(plan)}


def test_a_neighbour_has_a_token_of_every_step_while_a_grammar_is_compiled() -> None:
    world = roomy(compile_steps=20)
    world.add(free(1))
    world.step()
    world.add(bound(2))
    for _ in range(20):
        plan = world.step()
        assert shares(plan) == {1: 1}
        assert not admitted(plan)
    assert admitted(world.step()) == [2]
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt(2, 2), 30)


def test_it_waits_for_its_grammar_and_is_reported_so_ahead_of_the_others() -> None:
    world = roomy(max_num_seqs=1)
    world.add(free(1))
    world.step()
    world.add(bound(2), free(3))
    world.step()
    waiting = [report for report in world.scheduler.report(ReportPage(1, 9), now_s=9.0)]
    assert [(each.sequence_id, each.state, each.place, each.wait_reason) for each in waiting] == [
        (2, "waiting", 0, "grammar"),
        (3, "waiting", 1, "places"),
    ]
    assert world.scheduler.stats().num_waiting == 2
    world.abort(3)
    world.step()
    assert world.scheduler.stats().wait_reason is WaitReason.GRAMMAR
    world.run()


def test_nothing_fails_while_there_is_nothing_to_do_but_to_wait_for_a_grammar() -> None:
    world = roomy(compile_steps=50)
    world.add(bound(1, max_tokens=3))
    world.run()
    assert world.ended[SequenceId(1)].finish_reason is FinishReason.LENGTH
    assert world.scheduler.stats().num_stalls == 0


def test_so_many_are_compiled_at_once_as_take_the_time_that_is_allowed() -> None:
    world = roomy()
    world.add(*(bound(i) for i in range(1, 10)))
    world.step()
    assert world.scheduler.compilations.num_under_way == 4
    world.run()
    steps = admission_steps(world)
    assert [sum(step == first for step in steps.values()) for first in sorted({*steps.values()})] == [4, 4, 1]


def test_exactly_as_many_rows_as_may_run_are_compiled_while_all_places_are_taken() -> None:
    world = roomy(max_num_seqs=3, max_compiling_s=9.0)
    world.add(*(free(i, max_tokens=40) for i in (1, 2, 3)))
    world.step()
    world.add(*(bound(i) for i in range(4, 20)))
    compilations = world.scheduler.compilations
    for _ in range(12):
        world.step()
        assert compilations.num_under_way + len(compilations.compiled()) == 3
    world.abort(5)
    world.step()
    assert compilations.num_under_way + len(compilations.compiled()) == 3
    world.run()


def test_one_that_takes_longer_than_that_is_compiled_alone() -> None:
    world = roomy()
    world.add(bound(1, grammar=DEAR), bound(2, grammar=DEAR), bound(3))
    world.step()
    assert world.scheduler.compilations.num_under_way == 1
    world.run()


def test_those_without_a_grammar_pass_any_number_that_wait_for_theirs_and_nobody_counts() -> None:
    world = roomy(compile_steps=99)
    world.add(*(bound(i) for i in range(1, 100)), *(free(i) for i in range(100, 110)))
    assert admitted(world.step()) == [*range(100, 110)]
    assert {report.num_bypasses for report in world.scheduler.report(ReportPage(0, 200), now_s=0.0)} == {0}
    world.run(5000)


def test_one_that_leaves_while_it_is_compiled_ends_once_and_holds_its_room_until_the_report() -> None:
    world = roomy(compile_steps=5)
    world.add(bound(1, grammar=DEAR), bound(2, grammar=DEAR))
    world.step()
    world.abort(1)
    world.step()
    assert world.scheduler.compilations.num_under_way == 1
    assert world.ended[SequenceId(1)].finish_reason is FinishReason.ABORTED
    world.run()
    assert world.ended[SequenceId(2)].finish_reason is FinishReason.LENGTH


def test_one_that_leaves_between_its_compilation_and_its_place_is_named_as_unused() -> None:
    world = roomy(compile_steps=1, max_num_seqs=1)
    world.add(free(1))
    world.step()
    world.add(bound(2))
    world.step()
    world.scheduler.finish_requests([SequenceId(2)], FinishReason.ABORTED)
    assert world.scheduler.compilations.take_unused() == [2]
    world.run()


def test_a_time_limit_ends_one_that_is_still_being_compiled() -> None:
    world = roomy(compile_steps=50)
    world.add(bound(1, time_limits=TimeLimits(queue_s=4.0)))
    for _ in range(6):
        world.step()
    assert world.ended[SequenceId(1)].finish_reason is FinishReason.EXPIRED
    assert not world.scheduler.has_unfinished_requests


def test_each_tenant_has_its_turn_at_compilations() -> None:
    world = roomy(fairness=Fairness.TENANT)
    world.add(*(bound(i, grammar=DEAR, tenant="crowd") for i in range(1, 9)))
    for _ in range(9):
        world.step()
    world.add(bound(9, grammar=DEAR, tenant="alone"))
    world.run()
    steps = admission_steps(world)
    assert sum(steps[i] > steps[9] for i in range(1, 9)) >= 4


def test_one_that_comes_back_is_compiled_again_with_what_it_has_written() -> None:
    world = roomy(num_blocks=8, max_num_seqs=8)
    world.add(*(bound(i, max_tokens=20) for i in range(1, 6)))
    world.run()
    assert world.num_preemptions(PreemptionCause.GROWTH) >= 2
    for i in range(1, 6):
        assert world.tokens[SequenceId(i)] == continuation(prompt(2, i), 20)


def test_an_urgent_one_is_compiled_while_all_places_are_taken_and_then_gets_one() -> None:
    world = roomy(max_num_seqs=2, policy=SchedulingPolicy.PRIORITY)
    world.add(*(free(i, priority=5, max_tokens=60) for i in (1, 2)))
    world.step()
    world.add(bound(3, priority=5), bound(4, priority=0))
    assert not world.num_preemptions()
    for _ in range(4):
        world.step()
    assert 4 in admission_steps(world)
    assert world.num_preemptions(PreemptionCause.DISPLACED) == 1
    world.run()


def test_all_that_is_compiled_comes_into_one_step() -> None:
    world = roomy(max_compiling_s=1.0)
    world.add(*(bound(i, grammar=replace(GRAMMAR, cost_s=0.04)) for i in range(1, 9)))
    for _ in range(3):
        world.step()
    assert admitted(world.step()) == [*range(1, 9)]
    world.run()


def test_tenants_are_served_as_fairly_while_others_wait_for_their_grammars() -> None:
    def place_of_newcomer(*others: Sequence) -> int:
        world = roomy(60, fairness=Fairness.TENANT, max_num_seqs=4, displacement=Displacement.OFF)
        world.add(*(free(i, tenant="crowd", max_tokens=6) for i in range(1, 30)))
        for _ in range(12):
            world.step()
        world.add(free(100, tenant="newcomer", max_tokens=6), *others)
        world.run()
        return sorted(admission_steps(world).items(), key=itemgetter(1)).index(
            (100, admission_steps(world)[100])
        )

    dear = [bound(200 + i, tenant=f"bound {i}", grammar=DEAR) for i in range(2)]
    assert place_of_newcomer(*dear) == place_of_newcomer() < 12


def test_one_that_needs_no_grammar_passes_more_than_would_be_looked_at() -> None:
    world = roomy(10**6)
    world.add(*(bound(i) for i in range(1, 1100)), free(2000))
    assert admitted(world.step()) == [2000]


def test_a_step_looks_at_none_of_those_that_wait_for_their_grammars() -> None:
    world = roomy(10**6)
    for i in range(1, 1000):
        world.scheduler.add_request(bound(i), now_s=0.0)
    world.add(free(2000))
    looked_at: set[int] = set()
    obstacle = Admission._obstacle

    def counting(self: Admission, seq: Sequence, budget: SchedulingBudget) -> WaitReason | None:
        looked_at.add(seq.sequence_id)
        return obstacle(self, seq, budget)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "_obstacle", counting)
        world.step()
    assert looked_at == {2000}


def test_an_urgent_one_without_a_grammar_waits_for_nobody_that_waits_for_one() -> None:
    world = roomy(50, max_num_seqs=2, policy=SchedulingPolicy.PRIORITY)
    world.add(*(free(i, priority=5, max_tokens=60) for i in (1, 2)))
    world.step()
    world.add(*(bound(i, priority=0, grammar=DEAR) for i in (3, 4)))
    world.step()
    world.add(free(5, priority=0))
    assert admitted(world.step()) == [5]
    world.run()


def test_separate_batches_admit_others_while_a_grammar_is_compiled() -> None:
    world = roomy(50, batching=Batching.SEPARATE)
    world.add(free(1, max_tokens=60))
    world.step()
    world.add(bound(2))
    for _ in range(2):
        world.step()
    world.add(free(3))
    assert admitted(world.step()) == [3]
    world.run()


def test_an_ever_more_urgent_head_takes_the_row_of_the_least_urgent_and_no_further_one() -> None:
    world = roomy(1, max_num_seqs=3, policy=SchedulingPolicy.PRIORITY)
    world.add(*(free(i, max_tokens=60, priority=-9) for i in (1, 2, 3)))
    world.step()
    for i in range(10, 20):
        world.add(bound(i, priority=1000 - i))
        world.step()
    assert [seq.sequence_id for seq in world.scheduler.compilations.compiled()] == [19, 18, 17]
    world.run()
    assert all(world.ended[SequenceId(i)].finish_reason is FinishReason.LENGTH for i in range(10, 20))


def test_one_that_is_compiled_is_looked_at_although_as_many_wait_as_before() -> None:
    world = roomy(3, num_blocks=4, block_size=16, max_bypasses=5)
    world.add(make_sequence(1, prompt(33, 1), max_tokens=15))
    world.step()
    world.add(make_sequence(2, prompt(40, 2)), bound(3, max_tokens=2), make_sequence(4, prompt(33, 4)))
    waiting = world.scheduler._queues.waiting
    while len(waiting) < 3:
        world.step()
    world.abort(4)
    assert admitted(world.step()) == [3]
    world.run()
