"""Division of a step among the sequences."""

import sys
from collections import Counter
from dataclasses import replace
from types import FrameType

import pytest

from scheduler.config import PrefixCaching, SchedulingPolicy
from scheduler.input_messages import AnswerStart
from scheduler.messages import FinishReason, ModelRunnerOutput, SchedulerOutput, SequenceId
from scheduler.scheduler import NeverFits, Scheduler
from scheduler.step.planner import Planner
from tests.fakes import continuation, make_sequence
from tests.world import World, shares, small_config


def prompt(length: int, salt: int = 0) -> list[int]:
    """Different for each salt from the first token on, so that nothing is shared by chance."""
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def test_the_worked_example_of_budget_10_and_prompts_of_3_5_and_12_tokens() -> None:
    world = World(small_config(max_num_batched_tokens=10, num_blocks=32))
    world.add(*(make_sequence(i, prompt(n, i), max_tokens=8) for i, n in ((1, 3), (2, 5), (3, 12))))
    assert [shares(world.step()) for _ in range(4)] == [
        {1: 3, 2: 5, 3: 2},
        {1: 1, 2: 1, 3: 8},
        {1: 1, 2: 1, 3: 2},
        {1: 1, 2: 1, 3: 1},
    ]


def test_tokens_are_the_same_as_alone_and_all_blocks_come_back() -> None:
    world = World(small_config())
    world.add(*(make_sequence(i, prompt(5 + i, i), max_tokens=6) for i in range(1, 7)))
    world.run()
    for i in range(1, 7):
        assert world.tokens[SequenceId(i)] == continuation(prompt(5 + i, i), 6)
        assert world.reason(i) is FinishReason.LENGTH
    assert world.scheduler.kv.pool.num_used == 0
    assert world.scheduler.get_request_counts() == (0, 0, 0)


def test_decodes_get_their_token_before_a_prompt_gets_its_chunk() -> None:
    world = World(small_config(num_blocks=32, max_num_batched_tokens=8))
    world.add(make_sequence(1, prompt(2, 1), max_tokens=9))
    world.step()
    world.add(make_sequence(2, prompt(11, 2)))
    assert shares(world.step()) == {1: 1, 2: 7}
    world.add(make_sequence(3, prompt(9, 3)))
    plan = world.step()
    assert [(share.sequence_id, share.num_tokens) for share in plan.scheduled] == [(1, 1), (2, 4), (3, 3)]


def test_an_older_prefill_leaves_a_token_to_each_younger_decode() -> None:
    world = World(small_config(max_num_batched_tokens=8, num_blocks=32, policy=SchedulingPolicy.PRIORITY))
    world.add(make_sequence(2, prompt(2, 2), max_tokens=9, priority=5))
    world.step()
    world.add(make_sequence(1, prompt(30, 1), priority=0))
    world.step()
    assert shares(world.step()) == {2: 1, 1: 7}


def test_a_stop_token_ends_a_sequence_and_is_reported() -> None:
    tokens = continuation(prompt(6), 4)
    assert tokens.index(tokens[2]) == 2, "choose another prompt"
    world = World(small_config())
    world.add(make_sequence(1, prompt(6), max_tokens=9, stop_token_ids=(tokens[2],)))
    world.run()
    assert world.tokens[SequenceId(1)] == tokens[:3]
    assert world.reason(1) is FinishReason.STOP


@pytest.mark.parametrize(
    ("mark", "begin", "num_tokens"),
    [(None, None, 3), (1, None, 3), (1, 0, 3), (3, None, 6), (3, 0, 6), (3, 1, 3)],
)
def test_a_stop_token_of_the_caller_ends_the_answer_and_no_thoughts(mark, begin, num_tokens) -> None:
    """`mark` and `begin`: places in the output of the tokens around the thoughts."""
    tokens = continuation(prompt(6), 6)
    assert len(set(tokens[:6])) == 6, "choose another prompt"
    stop = (tokens[2],)
    answer = (
        None if mark is None else AnswerStart(token_ids=(tokens[mark],), text="</t>", stop_token_ids=stop)
    )
    if answer is not None and begin is not None:
        answer = replace(answer, begin="<t>", begin_token_ids=(tokens[begin],))
    world = World(small_config())
    world.add(make_sequence(1, prompt(6), max_tokens=6, stop_token_ids=stop, answer=answer))
    world.run()
    assert world.tokens[SequenceId(1)] == tokens[:num_tokens]


def test_a_sequence_ends_at_the_context_window() -> None:
    world = World(small_config(max_model_len=8))
    world.add(make_sequence(1, prompt(5), max_tokens=50))
    world.run()
    assert len(world.tokens[SequenceId(1)]) == 3
    assert world.reason(1) is FinishReason.LENGTH


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    world = World(small_config(max_num_seqs=2))
    world.add(*(make_sequence(i, prompt(2, i)) for i in range(1, 5)))
    assert shares(world.step()).keys() == {1, 2}
    assert world.scheduler.get_request_counts() == (2, 2, 0)


def test_first_come_first_served_does_not_let_a_small_prompt_pass_a_large_one() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(20, 1), max_tokens=9))
    world.step()
    world.add(make_sequence(2, prompt(20, 2)), make_sequence(3, prompt(2, 3)))
    world.step()
    assert [seq.sequence_id for seq in world.scheduler.running_sequences()] == [1]


def test_the_most_urgent_waiting_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    world = World(small_config(max_num_seqs=1, policy=SchedulingPolicy.PRIORITY))
    for i, priority in ((1, 3), (2, -1), (3, 0), (4, -1)):
        world.add(make_sequence(i, prompt(2, i), max_tokens=1, priority=priority))
    world.run()
    assert list(world.ended) == [2, 4, 3, 1]


def test_the_youngest_is_preempted_and_resumes_before_later_arrivals() -> None:
    world = World(small_config(num_blocks=4, max_num_seqs=3))
    world.add(make_sequence(1, prompt(7, 1), max_tokens=8), make_sequence(2, prompt(7, 2), max_tokens=4))
    world.step()
    world.add(make_sequence(3, prompt(2, 3), max_tokens=4))
    world.step()
    assert world.scheduler.get_request_counts() == (2, 1, 0)
    plan = world.step()
    assert shares(plan) == {1: 1}
    assert SequenceId(2) in plan.released
    assert world.num_preemptions() == 1
    world.run()
    assert list(world.ended) == [1, 2, 3]
    assert world.tokens[SequenceId(2)] == continuation(prompt(7, 2), 4)


def test_under_priority_the_least_urgent_is_preempted_even_if_it_is_the_oldest() -> None:
    world = World(small_config(num_blocks=4, policy=SchedulingPolicy.PRIORITY))
    world.add(make_sequence(1, prompt(7, 1), max_tokens=6, priority=9))
    world.step()
    world.add(make_sequence(2, prompt(7, 2), max_tokens=6, priority=0))
    world.step()
    world.run()
    assert list(world.ended) == [2, 1]
    assert world.tokens[SequenceId(1)] == continuation(prompt(7, 1), 6)


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    world = World(small_config(num_blocks=4, max_num_seqs=4, max_bypasses=2))
    world.add(make_sequence(1, prompt(8, 1), max_tokens=8), make_sequence(2, prompt(8, 2), max_tokens=8))
    world.step()
    world.add(make_sequence(3, prompt(1, 3)))
    plan = world.step()
    assert not plan.new_sequences
    assert shares(plan) == {1: 1}


def test_alone_in_a_pool_that_is_too_small_a_sequence_ends_with_length() -> None:
    world = World(small_config(num_blocks=2))
    world.add(make_sequence(1, prompt(5), max_tokens=50))
    world.run()
    assert world.reason(1) is FinishReason.LENGTH
    assert world.tokens[SequenceId(1)] == continuation(prompt(5), 4)


def test_one_that_outgrew_the_pool_beside_a_sharer_ends_instead_of_waiting_for_ever() -> None:
    world = World(small_config(num_blocks=2, max_num_seqs=2))
    world.add(make_sequence(1, prompt(4, 1), max_tokens=1))
    world.run()
    world.add(
        make_sequence(2, prompt(4, 1), max_tokens=9), make_sequence(3, [*prompt(4, 1), 5], max_tokens=9)
    )
    world.run()
    assert world.reason(2) is FinishReason.LENGTH
    assert world.reason(3) is FinishReason.LENGTH


def test_what_can_never_fit_is_refused_at_once_and_changes_nothing() -> None:
    world = World(small_config(num_blocks=2))
    with pytest.raises(NeverFits, match="9 tokens; the KV cache holds 8"):
        world.scheduler.add_request(make_sequence(1, prompt(9)), now_s=0.0)
    with pytest.raises(NeverFits, match="context window"):
        world.scheduler.add_request(make_sequence(1, prompt(64)), now_s=0.0)
    assert not world.scheduler.has_unfinished_requests
    world.add(make_sequence(1, prompt(8), max_tokens=1))
    world.run()


def test_an_id_in_use_is_refused() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(2)))
    with pytest.raises(ValueError, match="exists already"):
        world.scheduler.add_request(make_sequence(1, prompt(2)), now_s=0.0)


def test_the_watermark_keeps_room_for_those_who_run() -> None:
    world = World(small_config(watermark=0.25))
    world.add(make_sequence(1, prompt(20, 1), max_tokens=1), make_sequence(2, prompt(8, 2)))
    world.step()
    assert world.scheduler.get_request_counts() == (1, 1, 0)


def test_the_watermark_does_not_keep_a_large_prompt_out_of_an_empty_pool() -> None:
    world = World(small_config(watermark=0.5))
    world.add(make_sequence(1, prompt(32), max_tokens=1))
    world.run()
    assert world.reason(1) is FinishReason.LENGTH


@pytest.mark.parametrize("step", range(7))
def test_an_abort_at_any_moment_gives_everything_back(step: int) -> None:
    world = World(small_config(num_blocks=6))
    world.add(*(make_sequence(i, prompt(9, i), max_tokens=5) for i in (1, 2, 3)))
    for _ in range(step):
        world.step()
    alive = [i for i in (1, 2, 3) if i not in world.ended]
    world.abort(*alive, 99)
    assert all(world.reason(i) is FinishReason.ABORTED for i in alive)
    assert world.scheduler.kv.pool.num_used == 0
    assert not world.scheduler.has_unfinished_requests


def test_tokens_that_arrive_for_an_aborted_sequence_are_dropped() -> None:
    scheduler = Scheduler(small_config())
    scheduler.add_request(make_sequence(1, prompt(3)), now_s=0.0)
    plan = scheduler.schedule(now_s=0.0)
    scheduler.finish_requests([SequenceId(1)], FinishReason.ABORTED)
    result = ModelRunnerOutput(token_ids={SequenceId(1): (5,)}, logprobs={}, failures={})
    (outputs,) = scheduler.update_from_output(plan, result).values()
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [((), FinishReason.ABORTED)]


def test_a_sequence_that_fails_alone_takes_nobody_with_it() -> None:
    world = World(small_config())
    world.add(*(make_sequence(i, prompt(3, i)) for i in (1, 2)))
    world.worker.poisoned.add(SequenceId(1))
    world.run()
    assert world.reason(1) is FinishReason.FAILED
    assert world.ended[SequenceId(1)].message == "poisoned"
    assert world.tokens[SequenceId(2)] == continuation(prompt(3, 2), 4)


def test_what_a_failed_sequence_computed_is_never_found_in_the_prefix_cache() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(9)))
    world.worker.poisoned.add(SequenceId(1))
    world.run()
    world.add(make_sequence(2, prompt(9)))
    world.run()
    assert world.ended[SequenceId(2)].finish_reason is FinishReason.LENGTH
    assert world.scheduler.stats().num_prefix_hits == 0


def test_a_worker_that_forgets_a_sequence_fails_it_rather_than_hang_it() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(3)))
    world.worker.silent.add(SequenceId(1))
    world.run()
    assert world.reason(1) is FinishReason.FAILED


def test_a_failed_step_fails_those_in_it_and_spares_those_who_wait() -> None:
    world = World(small_config(max_num_seqs=1))
    world.add(make_sequence(1, prompt(9, 1)), make_sequence(2, prompt(9, 1)))
    world.worker.explode_next = True
    world.run()
    assert world.reason(1) is FinishReason.FAILED
    assert world.tokens[SequenceId(2)] == continuation(prompt(9, 1), 4)
    assert world.scheduler.stats().num_prefix_hits == 0, "the failed step wrote nothing that can be trusted"


def test_the_first_output_tells_how_long_it_queued() -> None:
    world = World(small_config(max_num_seqs=1))
    world.add(make_sequence(1, prompt(2, 1), max_tokens=3), make_sequence(2, prompt(2, 2), max_tokens=1))
    world.run()
    start = world.ended[SequenceId(2)].start
    assert start is not None
    assert start.queue_s == 3.0


def test_outputs_go_to_the_client_that_asked() -> None:
    scheduler = Scheduler(small_config())
    scheduler.add_request(make_sequence(1, prompt(3, 1), client_index=0), now_s=0.0)
    scheduler.add_request(make_sequence(2, prompt(3, 2), client_index=7), now_s=0.0)
    plan = scheduler.schedule(now_s=0.0)
    result = ModelRunnerOutput(token_ids={SequenceId(1): (5,), SequenceId(2): (6,)}, logprobs={}, failures={})
    outputs = scheduler.update_from_output(plan, result)
    assert {client: [o.sequence_id for o in news] for client, news in outputs.items()} == {0: [1], 7: [2]}


def test_a_sequence_that_its_own_grammar_ends_leaves_the_others_and_its_prefix_as_they_are() -> None:
    scheduler = Scheduler(small_config())
    for number in (1, 2):
        scheduler.add_request(make_sequence(number, prompt(9, number), max_tokens=4), now_s=0.0)
    plan = scheduler.schedule(now_s=0.0)
    result = ModelRunnerOutput(
        token_ids={SequenceId(2): (6,)}, logprobs={}, failures={}, unfit={SequenceId(1): "too dear"}
    )
    ended, other = scheduler.update_from_output(plan, result)[0]
    assert (ended.finish_reason, ended.message) == (FinishReason.UNFIT, "too dear")
    assert (other.finish_reason, other.token_ids) == (None, (6,))
    scheduler.add_request(make_sequence(3, prompt(9, 1)), now_s=0.0)
    assert SequenceId(1) in scheduler.schedule(now_s=0.0).released


def test_a_second_plan_before_the_results_does_not_repeat_work() -> None:
    scheduler = Scheduler(small_config(max_num_batched_tokens=8, max_plans_in_flight=4))
    scheduler.add_request(make_sequence(1, prompt(10), max_tokens=1), now_s=0.0)
    assert shares(scheduler.schedule(now_s=0.0)) == {1: 8}
    assert shares(scheduler.schedule(now_s=0.0)) == {1: 2}
    assert scheduler.schedule(now_s=0.0).is_empty


def test_the_same_history_gives_the_same_plans() -> None:
    def history() -> list[object]:
        world = World(small_config(num_blocks=6))
        world.add(*(make_sequence(i, prompt(6 + i, i % 2), max_tokens=7) for i in range(1, 6)))
        world.run()
        return list(world.worker.plans)

    assert history() == history()


def test_without_prefix_caching_nothing_is_found_again() -> None:
    world = World(small_config(prefix_caching=PrefixCaching.OFF))
    world.add(make_sequence(1, prompt(9)), make_sequence(2, prompt(9)))
    world.run()
    assert world.scheduler.stats().num_prefix_hits == 0
    assert len(world.scheduler.kv.index.main_cache) == 0


@pytest.mark.parametrize("most_tokens", [5, 64], ids=["parts of prompts", "whole prompts"])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_steps_of_decodes_alone_are_planned_in_one_loop_with_the_same_result(
    policy: SchedulingPolicy, block_size: int, most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a prompt stands among them, and where a block is lacking: then the loop is undone."""

    def history() -> tuple[list[SchedulerOutput], dict[SequenceId, list[int]]]:
        sizes = {"block_size": block_size, "num_blocks": 48 // block_size}
        world = World(
            small_config(**sizes, policy=policy, max_num_seqs=4, max_num_batched_tokens=most_tokens)
        )
        for number in range(1, 9):
            tokens = [number] * (3 * number % 7 + 1)
            world.add(make_sequence(number, tokens, max_tokens=5 + number % 4 * 6, priority=number % 2))
            for _ in range(number % 3 * 4):
                world.step()
        world.run()
        return world.worker.plans, world.tokens

    quick = history()
    assert any(len(plan.scheduled) > 1 for plan in quick[0])
    monkeypatch.setattr(Planner, "plan_decodes", lambda _: None)
    assert history() == quick


def num_calls_of_a_step(num_running: int) -> int:
    """Calls of functions that a step of decodes takes; unlike its time they are the same on each machine."""
    scheduler = Scheduler(small_config(num_blocks=999, max_num_seqs=64, max_num_batched_tokens=999))
    for number in range(num_running):
        scheduler.add_request(make_sequence(number, [number + 1] * 5, max_tokens=40), now_s=0.0)
    events: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        events[event] += 1

    for is_counted in (False, True):
        sys.setprofile(count if is_counted else None)
        plan = scheduler.schedule(now_s=0.0)
        tokens = dict.fromkeys([share.sequence_id for share in plan.scheduled], (50,))
        result = ModelRunnerOutput(token_ids=tokens, logprobs={}, failures={})
        scheduler.update_from_output(plan, result)
        sys.setprofile(None)
    return events["call"]


def test_a_step_of_decodes_takes_no_call_for_each_sequence() -> None:
    alone, many = num_calls_of_a_step(1), num_calls_of_a_step(64)
    assert many - alone <= 1
    assert alone < 30
