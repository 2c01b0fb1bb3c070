"""Inputs beside the tokens: encoder outputs in a bounded cache, and adapters in few places."""

import pytest

from scheduler.config import SchedulingPolicy
from scheduler.input_messages import EncoderInput
from scheduler.messages import (
    FinishReason,
    PoolingParams,
    PoolingTask,
    PromptComputation,
    ReportPage,
    SequenceId,
    WaitReason,
)
from scheduler.scheduler import NeverFits
from scheduler.sequence import Sequence
from scheduler.step import budget
from scheduler.step.admission import Admission
from scheduler.step.budget import SchedulingBudget
from tests.fakes import continuation, make_sequence, pooled
from tests.invariants import num_encoder_tokens
from tests.world import World, shares, small_config


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def image(offset: int, num_tokens: int = 4, content: str = "a cat") -> EncoderInput:
    return EncoderInput(offset, num_tokens, content)


def seeing(encoder_cache_tokens: int = 8, **changes: object) -> World:
    return World(small_config(**({"num_blocks": 32, "encoder_cache_tokens": encoder_cache_tokens} | changes)))


def encoded(world: World) -> list[dict[int, list[int]]]:
    """Offsets of what is to be encoded, by plan and by sequence."""
    return [
        {i: [item.offset for item in inputs] for i, inputs in plan.encoder_inputs.items()}
        for plan in world.worker.plans
    ]


def test_an_input_is_encoded_beside_the_shares_before_it() -> None:
    world = seeing(max_num_batched_tokens=6)
    world.add(make_sequence(1, prompt(14), encoder_inputs=(image(8),), max_tokens=2))
    world.run()
    assert encoded(world) == [{1: [8]}, {}, {}, {}]
    assert world.tokens[SequenceId(1)] == continuation(prompt(14), 2)


def test_a_share_ends_before_an_input_that_is_not_encoded_yet() -> None:
    world = seeing()
    world.worker.most_encoded = 1
    world.add(make_sequence(1, prompt(14), encoder_inputs=(image(2), image(7)), max_tokens=1))
    world.run()
    assert encoded(world) == [{1: [2, 7]}, {1: [7]}, {}]
    assert [share.num_tokens for plan in world.worker.plans for share in plan.scheduled] == [2, 5, 7]


def test_others_go_on_while_an_input_is_encoded_for_several_steps() -> None:
    world = seeing()
    world.worker.encodes_every = 3
    world.add(make_sequence(1, prompt(3, 1), max_tokens=9))
    world.add(make_sequence(2, prompt(9, 2), encoder_inputs=(image(0),), max_tokens=1))
    assert [shares(world.step()) for _ in range(4)] == [{1: 3}, {1: 1}, {1: 1}, {1: 1, 2: 9}]
    [report] = world.scheduler.report(ReportPage(0, 9), now_s=0.0)
    assert report.wait_reason == ""


def test_one_that_runs_and_waits_for_the_encoder_says_so() -> None:
    world = seeing()
    world.worker.encodes_every = 2
    world.add(make_sequence(1, prompt(9), encoder_inputs=(image(0),), max_tokens=1))
    world.step()
    [report] = world.scheduler.report(ReportPage(0, 9), now_s=0.0)
    assert (report.state, report.wait_reason) == ("running", "encoder")
    world.run()


def test_encoding_gets_a_small_part_of_a_step_that_others_wait_for() -> None:
    world = seeing(target_itl_s=0.5)
    world.worker.encodes_every = 99
    world.add(make_sequence(1, prompt(3, 1), max_tokens=40))
    for _ in range(12):
        world.step()  # a token takes 50 ms
    world.add(make_sequence(2, prompt(9, 2), encoder_inputs=(image(0),), max_tokens=1))
    assert 0.2 * 0.05 <= world.step().encoder_slice_s < 0.2 * 0.07  # the first step had three tokens
    world.abort(1)
    assert world.step().encoder_slice_s == 0.2


def test_steps_that_only_encode_say_nothing_of_how_long_others_take() -> None:
    world = seeing(target_itl_s=0.5)
    world.worker.encodes_every = 10**6
    world.add(make_sequence(1, prompt(3, 1), max_tokens=12))
    world.run()
    world.add(make_sequence(2, prompt(9, 2), encoder_inputs=(image(0),), max_tokens=1))
    for _ in range(99):
        assert not world.step().num_scheduled_tokens
    world.add(make_sequence(3, prompt(3, 3), max_tokens=9))
    world.step()
    assert 0.2 * 0.05 <= world.step().encoder_slice_s < 0.2 * 0.07


def test_an_input_that_cannot_be_encoded_ends_its_request_alone() -> None:
    world = seeing()
    world.worker.broken = {"a cat"}
    world.add(make_sequence(1, prompt(9), encoder_inputs=(image(2),), max_tokens=1))
    world.add(make_sequence(2, prompt(9), encoder_inputs=(image(2, content="a dog"),), max_tokens=1))
    world.run()
    assert world.ended[SequenceId(1)].finish_reason is FinishReason.FAILED
    assert world.tokens[SequenceId(2)] == continuation(prompt(9), 1)


def test_an_output_is_kept_until_the_last_of_its_positions_is_computed() -> None:
    world = seeing(max_num_batched_tokens=4)
    world.add(make_sequence(1, prompt(12), encoder_inputs=(image(2, 6),), max_tokens=1))
    held = []
    for _ in range(3):
        world.step()
        held.append(num_encoder_tokens(world.scheduler))
    assert held == [6, 6, 0]
    world.run()


def test_room_in_the_cache_comes_back_for_the_next_plan() -> None:
    world = seeing(encoder_cache_tokens=4)
    world.add(*(make_sequence(i, prompt(7, i), encoder_inputs=(image(1),), max_tokens=1) for i in (1, 2)))
    assert shares(world.step()) == {1: 1, 2: 1}
    assert shares(world.step()) == {1: 6}, "this plan still needs what the last of its positions takes"
    assert [shares(world.step()), shares(world.step())] == [{}, {2: 6}]


def test_one_that_lacked_the_encoder_behind_a_stuck_head_is_looked_at_again() -> None:
    world = seeing(num_blocks=9, max_bypasses=5, encoder_cache_tokens=4)
    world.add(make_sequence(1, prompt(13, 1), max_tokens=9))
    world.step()
    world.add(make_sequence(2, prompt(30, 2)))
    world.add(*(make_sequence(i, prompt(6, i), encoder_inputs=(image(0),), max_tokens=9) for i in (3, 4)))
    assert [shares(world.step()) for _ in range(4)] == [
        {1: 1},
        {1: 1, 3: 6},
        {1: 1, 3: 1},
        {1: 1, 3: 1, 4: 6},
    ]


def test_one_that_has_to_wait_for_room_is_passed_and_the_reason_is_told() -> None:
    world = seeing(max_bypasses=2, encoder_cache_tokens=4)
    world.add(make_sequence(1, prompt(7, 1), encoder_inputs=(image(1),), max_tokens=1))
    world.add(make_sequence(2, prompt(7, 2), encoder_inputs=(image(0),), max_tokens=1))
    world.add(make_sequence(3, prompt(2, 3), max_tokens=1))
    assert shares(world.step()) == {1: 1, 3: 2}
    assert world.scheduler.stats().wait_reason is WaitReason.ENCODER
    world.run()


def test_a_preempted_prompt_gives_its_room_back_and_encodes_again() -> None:
    world = seeing(max_num_seqs=1, max_num_batched_tokens=4, policy=SchedulingPolicy.PRIORITY)
    world.add(make_sequence(1, prompt(9, 1), encoder_inputs=(image(2),), max_tokens=1, priority=5))
    world.step()
    world.add(make_sequence(2, prompt(6, 2), encoder_inputs=(image(0),), max_tokens=1, priority=0))
    world.run()
    assert [plan for plan in encoded(world) if plan] == [{1: [2]}, {2: [0]}, {1: [2]}]


def test_an_abort_frees_the_encoder_cache() -> None:
    world = seeing(max_num_batched_tokens=4)
    world.add(make_sequence(1, prompt(9, 1), encoder_inputs=(image(2),)))
    world.step()
    world.abort(1)
    assert num_encoder_tokens(world.scheduler) == 0


@pytest.mark.parametrize(("content", "start"), [("a cat", 8), ("a dog", 0)])
def test_equal_placeholders_are_one_prefix_only_if_they_stand_for_equal_inputs(
    content: str, start: int
) -> None:
    world = seeing()
    world.add(make_sequence(1, prompt(9), encoder_inputs=(image(1),), max_tokens=1))
    world.run()
    world.add(make_sequence(2, prompt(9), encoder_inputs=(image(1, content=content),), max_tokens=1))
    plan = world.step()
    assert plan.scheduled[0].start == start
    assert bool(plan.encoder_inputs) == (start == 0), "whose positions were found is not encoded"


def test_an_input_of_which_only_the_beginning_was_found_is_encoded_whole() -> None:
    world = seeing()
    world.add(make_sequence(1, prompt(4), max_tokens=1, encoder_inputs=()))
    world.add(make_sequence(2, prompt(9), encoder_inputs=(image(2),), max_tokens=1))
    world.run()
    world.add(make_sequence(3, [*prompt(7), 70, 71], encoder_inputs=(image(2),), max_tokens=1))
    assert world.step().encoder_inputs == {3: (image(2),)}
    assert world.step().scheduled[0].start == 4


def test_an_input_larger_than_the_cache_is_refused_at_once() -> None:
    world = seeing(encoder_cache_tokens=3)
    with pytest.raises(NeverFits, match="4 encoder tokens; at most 3 have room"):
        world.add(make_sequence(1, prompt(9), encoder_inputs=(image(1),)))


@pytest.mark.parametrize("inputs", [(image(1), image(4)), (image(5),), (image(1, 0),)])
def test_inputs_that_overlap_or_end_the_prompt_or_are_empty_are_refused(
    inputs: tuple[EncoderInput, ...],
) -> None:
    with pytest.raises(ValueError, match="overlaps the one before it, or has no token"):
        seeing().add(make_sequence(1, prompt(9), encoder_inputs=inputs))


def test_an_input_that_is_computed_at_once_is_not_cut() -> None:
    world = seeing(inputs_at_once=True, max_num_batched_tokens=8, max_chunk_tokens=3)
    world.add(make_sequence(1, prompt(3, 1), max_tokens=30))
    world.step()
    world.add(make_sequence(2, prompt(16, 2), encoder_inputs=(image(9, 6),), max_tokens=1))
    assert [shares(world.step()) for _ in range(3)] == [{1: 1, 2: 7}, {1: 1, 2: 2}, {1: 1, 2: 7}]
    with pytest.raises(NeverFits, match="9 encoder tokens; at most 8 have room"):
        world.add(make_sequence(3, prompt(16, 3), encoder_inputs=(image(1, 9),)))


def test_the_pace_of_others_does_not_hold_an_input_up_that_is_computed_at_once() -> None:
    world = seeing(inputs_at_once=True, encoder_cache_tokens=40, max_num_batched_tokens=64, target_itl_s=0.2)
    world.add(make_sequence(1, prompt(12, 1), max_tokens=40))
    for _ in range(12):
        world.step()  # a token takes 50 ms: there is time for 16 of a prompt
    world.add(make_sequence(2, prompt(40, 2), encoder_inputs=(image(2, 30),), max_tokens=1))
    assert [shares(world.step()) for _ in range(3)] == [{1: 1, 2: 2}, {1: 1, 2: 30}, {1: 1, 2: 8}]


def test_an_indivisible_prompt_waits_until_there_is_room_for_all_of_its_inputs_and_all_are_encoded() -> None:
    at_once = PoolingParams(task=PoolingTask.EMBED, prompt=PromptComputation.AT_ONCE)
    world = seeing()
    world.add(make_sequence(1, prompt(6, 1), encoder_inputs=(image(1),), max_tokens=1))
    two = (image(0), image(4))
    world.add(make_sequence(2, prompt(9, 2), encoder_inputs=two, pooling=at_once))
    assert shares(world.step()) == {1: 1}
    world.run()
    assert world.ended[SequenceId(2)].pooled == pooled(prompt(9, 2))
    with pytest.raises(NeverFits, match="12 encoder tokens"):
        world.add(make_sequence(3, prompt(14), encoder_inputs=(*two, image(8)), pooling=at_once))


# Adapters.


def running(world: World) -> set[int]:
    return {seq.sequence_id for seq in world.scheduler.running_sequences()}


def test_so_many_different_adapters_run_at_once_and_any_number_of_sequences_with_the_same() -> None:
    world = World(small_config(num_blocks=32, max_num_seqs=8, max_adapters=2, max_bypasses=9))
    for number, adapter in enumerate(["x", "y", "z", "x", "", "z"], 1):
        world.add(make_sequence(number, prompt(2, number), adapter=adapter, max_tokens=number))
    world.step()
    assert running(world) | world.ended.keys() == {1, 2, 4, 5}
    assert world.scheduler.stats().wait_reason is WaitReason.ADAPTER
    world.run()
    assert world.tokens[SequenceId(3)] == continuation(prompt(2, 3), 3)


def test_one_that_waits_for_a_place_for_its_adapter_is_passed_by_sixteen_that_have_one() -> None:
    world = World(small_config(num_blocks=32, max_adapters=1, max_bypasses=32))
    world.add(make_sequence(1, prompt(2, 1), adapter="x", max_tokens=30))
    world.step()
    world.add(make_sequence(2, prompt(2, 2), adapter="y", max_tokens=1))
    world.add(*(make_sequence(number, [number], adapter="x", max_tokens=1) for number in range(3, 33)))
    world.run()
    assert list(world.ended).index(2) == 1 + 16


def test_one_whose_adapter_has_no_place_is_looked_up_once_the_step_has_time_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "_MOST_HASHED_TOKENS", 40)
    world = World(small_config(num_blocks=32, max_num_batched_tokens=64, max_adapters=1))
    world.add(make_sequence(1, prompt(30, 1), adapter="x", max_tokens=9))
    world.add(second := make_sequence(2, prompt(30, 2), adapter="y"))
    world.step()
    assert not second.block_keys
    world.step()
    assert len(second.block_keys) == 29 // 4


def test_one_whose_adapter_has_no_place_holds_nobody_without_an_adapter_up() -> None:
    world = World(small_config(num_blocks=32, max_num_seqs=8, max_adapters=1))
    world.add(make_sequence(1, prompt(2, 1), adapter="x", max_tokens=9))
    world.add(*(make_sequence(i, prompt(2, i), adapter="y", max_tokens=1) for i in range(2, 12)))
    world.add(*(make_sequence(i, prompt(2, i), max_tokens=1) for i in range(12, 40)))
    world.run()
    assert list(world.ended)[:28] == [*range(12, 40)]
    assert list(world.ended)[28:] == [1, *range(2, 12)]


def test_one_whose_adapter_has_no_place_is_passed_by_16_whose_adapters_are_in_use() -> None:
    world = World(small_config(num_blocks=32, max_num_seqs=2, max_adapters=1))
    world.add(make_sequence(1, prompt(2, 1), adapter="x", max_tokens=40))
    world.add(make_sequence(2, prompt(2, 2), adapter="y", max_tokens=1))
    world.add(*(make_sequence(i, prompt(2, i), adapter="x", max_tokens=1) for i in range(3, 30)))
    world.run()
    assert list(world.ended) == [*range(3, 19), 1, 2, *range(19, 30)]


def test_one_that_passes_for_an_adapter_is_found_behind_any_number_and_no_other_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[int] = []
    obstacle = Admission._obstacle

    def counting(self: Admission, seq: Sequence, budget: SchedulingBudget) -> WaitReason | None:
        looked_at.append(seq.sequence_id)
        return obstacle(self, seq, budget)

    monkeypatch.setattr(Admission, "_obstacle", counting)
    world = World(small_config(num_blocks=99, max_num_seqs=8, max_num_batched_tokens=64, max_adapters=1))
    world.add(make_sequence(1, prompt(2, 1), adapter="x", max_tokens=20))
    world.step()
    for i in range(10, 1500):
        world.scheduler.add_request(make_sequence(i, prompt(2, i), adapter="y"), now_s=0.0)
    world.add(*(make_sequence(i, prompt(2, i), max_tokens=9) for i in (2001, 2002, 2003)))
    world.add(make_sequence(2004, prompt(2, 4), adapter="x"), make_sequence(2005, prompt(2, 5), adapter="z"))
    looked_at.clear()
    assert [new.sequence_id for new in world.step().new_sequences] == [2001, 2002, 2003, 2004]
    assert looked_at == [10, 2001, 10, 2002, 10, 2003, 10, 2004, 10]


def test_among_those_that_pass_for_an_adapter_one_that_lacks_memory_is_not_passed() -> None:
    world = World(small_config(num_blocks=9, max_num_seqs=8, max_adapters=1))
    world.add(make_sequence(1, prompt(13, 1), adapter="x", max_tokens=9))
    world.step()
    world.add(make_sequence(2, prompt(2, 2), adapter="y", max_tokens=1))
    world.add(make_sequence(3, prompt(30, 3), max_tokens=1), make_sequence(4, prompt(2, 4), max_tokens=1))
    assert shares(world.step()) == {1: 1}
    world.run()
    assert next(iter(world.ended)) == 1


def test_an_urgent_one_whose_adapter_has_no_place_sends_nobody_away() -> None:
    world = World(
        small_config(num_blocks=32, max_num_seqs=2, max_adapters=1, policy=SchedulingPolicy.PRIORITY)
    )
    world.add(*(make_sequence(i, prompt(2, i), adapter="x", max_tokens=4, priority=5) for i in (1, 2)))
    world.step()
    world.add(make_sequence(3, prompt(2, 3), adapter="y", priority=0))
    world.step()
    assert world.num_preemptions() == 0
    world.run()


def test_a_prefix_computed_with_another_adapter_is_not_found() -> None:
    world = World(small_config(num_blocks=32, max_adapters=2))
    for number, (adapter, start) in enumerate([("x", 0), ("y", 0), ("", 0), ("x", 8)], 1):
        world.add(make_sequence(number, prompt(9), adapter=adapter, max_tokens=1))
        assert world.step().scheduled[0].start == start
        world.run()


def test_without_places_for_adapters_they_are_refused() -> None:
    with pytest.raises(NeverFits, match="adapter 'x': no adapters are served"):
        World(small_config()).add(make_sequence(1, prompt(2), adapter="x"))


def test_the_worker_is_told_which_adapter_a_sequence_is_run_with() -> None:
    world = World(small_config(max_adapters=1))
    world.add(make_sequence(1, prompt(2), adapter="x"))
    assert [new.adapter for new in world.step().new_sequences] == ["x"]
