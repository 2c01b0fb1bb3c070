"""Plans that are made before the results of earlier ones are known."""

import pytest

from scheduler.config import Batching, PreemptionMode
from scheduler.messages import FinishReason, ModelRunnerOutput, SequenceId, TimeLimits
from scheduler.scheduler import Scheduler
from tests.fakes import continuation, make_sequence
from tests.world import World, shares, small_config, windows_of


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def deep(depth: int = 2, **changes: object) -> World:
    return World(small_config(**({"num_blocks": 32, "max_plans_in_flight": depth} | changes)))


def positions(world: World, sequence_id: int) -> list[int]:
    """Positions at which its shares began."""
    return [s.start for plan in world.worker.plans for s in plan.scheduled if s.sequence_id == sequence_id]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_token_is_computed_before_anybody_has_heard_of_it_and_none_beyond_the_last(depth: int) -> None:
    world = deep(depth)
    world.add(make_sequence(1, prompt(5), max_tokens=6))
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(5), 6)
    assert positions(world, 1) == [0, 5, 6, 7, 8, 9], (
        "max_tokens is known beforehand: nothing is drawn in vain"
    )


def test_nothing_is_drawn_beyond_the_context_window() -> None:
    world = deep(3, max_model_len=8)
    world.add(make_sequence(1, prompt(5), max_tokens=50))
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(5), 3)
    assert positions(world, 1) == [0, 5, 6]


def test_what_was_drawn_behind_a_stop_token_before_that_was_known_is_dropped() -> None:
    tokens = continuation(prompt(6), 4)
    assert tokens.index(tokens[2]) == 2, "choose another prompt"
    world = deep(3)
    world.add(make_sequence(1, prompt(6), max_tokens=9, stop_token_ids=(tokens[2],)))
    world.run()
    assert world.tokens[SequenceId(1)] == tokens[:3]
    assert world.reason(1) is FinishReason.STOP
    assert len(positions(world, 1)) == 3 + 2, "two plans were under way when it was seen"
    assert world.scheduler.kv.pool.num_used == 0


def test_no_more_plans_are_made_than_may_be_in_flight() -> None:
    scheduler = Scheduler(small_config(max_plans_in_flight=2))
    scheduler.add_request(make_sequence(1, prompt(3)), now_s=0.0)
    scheduler.schedule(now_s=0.0)
    scheduler.schedule(now_s=0.0)
    assert not scheduler.can_schedule
    with pytest.raises(AssertionError, match="must come first"):
        scheduler.schedule(now_s=0.0)


def test_results_are_taken_in_the_order_of_the_plans_only() -> None:
    scheduler = Scheduler(small_config(max_plans_in_flight=2))
    scheduler.add_request(make_sequence(1, prompt(3)), now_s=0.0)
    scheduler.schedule(now_s=0.0)
    second = scheduler.schedule(now_s=0.0)
    with pytest.raises(AssertionError, match="in the order"):
        scheduler.update_from_output(second, ModelRunnerOutput(token_ids={}, logprobs={}, failures={}))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("step", range(8))
def test_an_abort_at_any_moment_is_told_once_and_late_tokens_are_dropped(step: int, depth: int) -> None:
    world = deep(depth, num_blocks=6)
    world.add(*(make_sequence(i, prompt(9, i), max_tokens=5) for i in (1, 2, 3)))
    for _ in range(step):
        world.step()
    alive = [i for i in (1, 2, 3) if i not in world.ended]
    world.abort(*alive)
    world.learn_all()
    assert all(world.reason(i) is FinishReason.ABORTED for i in alive)
    assert world.scheduler.kv.pool.num_used == 0


def preempted_in_flight(**changes: object) -> World:
    """Sequence 2 has just lost its blocks, and a token of it is on its way."""
    world = deep(2, **({"num_blocks": 4} | changes))
    world.add(make_sequence(1, prompt(7, 1), max_tokens=8), make_sequence(2, prompt(7, 2), max_tokens=6))
    while not world.num_preemptions():
        world.step()
    return world


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_a_token_that_was_on_its_way_when_its_sequence_was_preempted_counts(mode: PreemptionMode) -> None:
    scheduler = Scheduler(
        small_config(num_blocks=4, max_plans_in_flight=2, preemption_mode=mode, num_host_blocks=8)
    )
    for i in (1, 2):
        scheduler.add_request(make_sequence(i, prompt(7, i), max_tokens=6), now_s=0.0)
    first = scheduler.schedule(now_s=0.0)
    second = scheduler.schedule(now_s=0.0)
    scheduler.update_from_output(first, drawn(41, 42))
    third = scheduler.schedule(now_s=0.0)  # two more blocks are needed, and none is free
    assert [preemption.sequence_id for preemption in third.preemptions] == [2]
    outputs = scheduler.update_from_output(second, drawn(51, 52))[0]
    assert [(output.sequence_id, output.token_ids) for output in outputs] == [(1, (51,)), (2, (52,))]
    scheduler.finish_requests([SequenceId(1)], FinishReason.ABORTED)
    back = scheduler.schedule(now_s=0.0).new_sequences
    assert [new.token_ids for new in back] == [(*prompt(7, 2), 42, 52)]


def drawn(*token_ids: int) -> ModelRunnerOutput:
    """Output in which sequences 1, 2, ... sampled these tokens."""
    tokens = {SequenceId(i): (token,) for i, token in enumerate(token_ids, 1)}
    return ModelRunnerOutput(token_ids=tokens, logprobs={}, failures={})


def test_nobody_returns_to_the_line_before_all_of_its_tokens_are_known() -> None:
    scheduler = Scheduler(small_config(num_blocks=4, max_plans_in_flight=3))
    for i in (1, 2):
        scheduler.add_request(make_sequence(i, prompt(7, i), max_tokens=6), now_s=0.0)
    first = scheduler.schedule(now_s=0.0)
    second = scheduler.schedule(now_s=0.0)
    third = scheduler.schedule(now_s=0.0)
    assert [preemption.sequence_id for preemption in third.preemptions] == [2]
    scheduler.finish_requests([SequenceId(1)], FinishReason.ABORTED)
    scheduler.update_from_output(first, drawn(41, 42))
    assert scheduler.schedule(now_s=0.0).is_empty
    assert scheduler.get_request_counts().waiting == 1
    scheduler.update_from_output(second, drawn(51, 52))
    assert scheduler.schedule(now_s=0.0).new_sequences[0].token_ids[-2:] == (42, 52)
    scheduler.update_from_output(third, drawn())


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_preempted_in_flight_it_has_the_same_tokens_as_alone_each_told_once(mode: PreemptionMode) -> None:
    world = preempted_in_flight(preemption_mode=mode, num_host_blocks=8)
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(7, 1), 8)
    assert world.tokens[SequenceId(2)] == continuation(prompt(7, 2), 6)


def test_one_whose_last_token_is_on_its_way_when_it_is_preempted_ends_without_returning() -> None:
    scheduler = Scheduler(small_config(num_blocks=4, max_plans_in_flight=2))
    scheduler.add_request(make_sequence(1, prompt(7, 1), max_tokens=6), now_s=0.0)
    scheduler.add_request(make_sequence(2, prompt(7, 2), max_tokens=2), now_s=0.0)
    first = scheduler.schedule(now_s=0.0)
    second = scheduler.schedule(now_s=0.0)
    scheduler.update_from_output(first, drawn(41, 42))
    scheduler.schedule(now_s=0.0)
    assert scheduler.get_request_counts().waiting == 1
    outputs = scheduler.update_from_output(second, drawn(51, 52))[0]
    assert (outputs[1].token_ids, outputs[1].finish_reason) == ((52,), FinishReason.LENGTH)
    assert scheduler.get_request_counts() == (1, 0, 0)


def test_alone_in_a_full_pool_it_gets_what_is_on_its_way_before_it_ends() -> None:
    world = deep(3, num_blocks=2)
    world.add(make_sequence(1, prompt(5), max_tokens=50))
    world.run()
    assert world.reason(1) is FinishReason.LENGTH
    assert world.tokens[SequenceId(1)] == continuation(prompt(5), 4)


def test_one_whose_time_is_over_keeps_what_was_told_and_nothing_comes_later() -> None:
    world = deep(3)
    world.add(make_sequence(1, prompt(3, 1), max_tokens=20, time_limits=TimeLimits(total_s=5.0)))
    world.run()
    assert world.reason(1) is FinishReason.EXPIRED
    assert world.tokens[SequenceId(1)] == continuation(prompt(3, 1), 3)


def test_blocks_of_one_that_ended_are_reused_while_an_earlier_plan_still_writes_to_them() -> None:
    """The plans are carried out in order, so the later writer comes later: the fake worker checks it."""
    tokens = continuation(prompt(6, 1), 4)
    world = deep(3, num_blocks=4)
    world.add(make_sequence(1, prompt(6, 1), max_tokens=9, stop_token_ids=(tokens[1],)))
    world.add(make_sequence(2, prompt(11, 2), max_tokens=4))
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt(11, 2), 4)
    last_write = max(plan.step for plan in world.worker.plans if 1 in shares(plan))
    admitted = next(
        plan.step for plan in world.worker.plans if 2 in {n.sequence_id for n in plan.new_sequences}
    )
    assert admitted == last_write + 1


def test_a_block_that_ends_with_a_token_on_its_way_is_found_once_the_token_is_known() -> None:
    world = deep(2)
    world.add(make_sequence(1, prompt(6, 1), max_tokens=7))
    world.run()
    world.add(make_sequence(2, [*prompt(6, 1), *world.tokens[SequenceId(1)], 5], max_tokens=1))
    assert world.step().scheduled[0].start == 12


def test_a_failed_step_fails_those_in_it_and_those_admitted_since_and_spares_the_rest() -> None:
    world = deep(2, max_num_seqs=4, max_num_batched_tokens=8)
    world.add(make_sequence(1, prompt(4, 1), max_tokens=1), make_sequence(2, prompt(4, 2), max_tokens=9))
    world.step()
    world.worker.explode_next = True
    world.add(make_sequence(3, prompt(6, 3)))
    world.step()  # 2 and 3 are in it
    world.add(make_sequence(4, [*prompt(6, 3)[:4], 9]))
    world.step()  # 4 shares what 3 was to write
    world.add(make_sequence(5, [*prompt(6, 3)[:4], 9]))
    world.run()
    assert [i for i in range(1, 6) if world.reason(i) is FinishReason.FAILED] == [2, 3, 4]
    assert world.tokens[SequenceId(5)] == continuation([*prompt(6, 3)[:4], 9], 4)
    assert positions(world, 5)[0] == 0, "nothing of what was published since is found"


def test_whoever_runs_but_was_not_in_the_failed_step_goes_on() -> None:
    world = deep(2, batching=Batching.SEPARATE)
    world.add(make_sequence(1, prompt(4, 1), max_tokens=9))
    for _ in range(3):
        world.step()
    world.worker.explode_next = True
    world.add(make_sequence(2, prompt(6, 2)))
    assert shares(world.step()) == {2: 6}
    assert 1 in shares(world.step()), "planned before the failure is known"
    world.run()
    assert world.reason(2) is FinishReason.FAILED
    assert world.tokens[SequenceId(1)] == continuation(prompt(4, 1), 9)


def test_a_failure_heard_of_after_its_sequence_was_aborted_still_empties_the_cache() -> None:
    scheduler = Scheduler(small_config(max_plans_in_flight=2))
    scheduler.add_request(make_sequence(1, prompt(9, 1)), now_s=0.0)
    plan = scheduler.schedule(now_s=0.0)
    scheduler.finish_requests([SequenceId(1)], FinishReason.ABORTED)
    assert len(scheduler.kv.index.main_cache) == 2
    failed = ModelRunnerOutput(token_ids={}, logprobs={}, failures={SequenceId(1): "not finite"})
    scheduler.update_from_output(plan, failed)
    assert len(scheduler.kv.index.main_cache) == 0


def test_further_failures_of_a_sequence_that_failed_cost_nobody_else_its_cache() -> None:
    world = deep(3)
    world.add(make_sequence(1, prompt(9, 1), max_tokens=1))
    world.run()
    world.add(make_sequence(2, prompt(9, 2)))
    world.worker.poisoned.add(SequenceId(2))
    world.run()
    assert world.reason(2) is FinishReason.FAILED
    world.add(make_sequence(3, prompt(9, 1), max_tokens=1))
    assert world.step().scheduled[0].start == 8


def test_a_block_that_the_window_passed_before_its_last_token_was_known_cannot_be_found() -> None:
    world = deep(4, groups=windows_of(2), num_blocks=6, max_model_len=200)
    world.add(make_sequence(1, prompt(5), max_tokens=40))
    world.run()
    world.add(make_sequence(2, prompt(5) + world.tokens[SequenceId(1)][:30], max_tokens=9))
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt(5), 39)[30:]
