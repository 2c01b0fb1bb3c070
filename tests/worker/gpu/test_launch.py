"""Steps that are launched before the results of earlier ones are read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scheduler.messages import (
    BlockId,
    NewSequence,
    NewTable,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
)
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.gpu.ahead import AheadDriver, RememberingSteps, let_work_ahead, nan_for
from tests.worker.plan_driver import GREEDY, PlanDriver
from worker.steps.generation_step import GenerationSteps
from worker.steps.row_table import UNKNOWN_TOKEN
from worker.worker import Worker
from worker.worker_errors import StepOutOfMemory

PROMPTS = ([5, 9, 100, 7, 3, 11, 20], [4, 8, 15, 16, 23, 42] * 3, [77], [200, 1, 2, 3, 9])
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=7, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5),
    SamplingParams(temperature=1.3, seed=5, bad_words=((1, 2),), min_tokens=3, stop_token_ids=(9,)),
)
NUM_TOKENS = 7


@pytest.fixture(scope="module")
def plain(checkpoints: MakeCheckpoint) -> Worker:
    return load_worker(checkpoints("llama"), swap_space_bytes=1 << 20)[0]


@pytest.fixture(scope="module")
def ahead_worker(checkpoints: MakeCheckpoint) -> tuple[Worker, RememberingSteps]:
    worker, _ = load_worker(checkpoints("llama"), swap_space_bytes=1 << 20)
    return worker, let_work_ahead(worker)


@pytest.fixture
def ahead(ahead_worker: tuple[Worker, RememberingSteps]) -> Iterator[Worker]:
    worker, steps = ahead_worker
    steps.num_filled = 0
    yield worker
    table = steps_of(worker).rows
    worker.execute(plan(released=tuple(table._row_of)))
    assert not steps_of(worker)._pending


def steps_of(worker: Worker) -> GenerationSteps:
    assert isinstance(worker._steps, GenerationSteps)
    return worker._steps


def plan(
    *new: NewSequence,
    released: tuple[SequenceId, ...] = (),
    decodes: tuple[tuple[int, int], ...] = (),
    **more: Any,
) -> SchedulerOutput:
    """All prompts of `new` whole, and one token each of `decodes`, which say at which position."""
    shares = [ScheduledSequence(SequenceId(each), start, 1, samples=True) for each, start in decodes]
    shares += [ScheduledSequence(each.sequence_id, 0, len(each.token_ids), samples=True) for each in new]
    return SchedulerOutput(
        step=0,
        released=released,
        new_sequences=new,
        new_blocks={},
        scheduled=tuple(shares),
        num_scheduled_tokens=sum(share.num_tokens for share in shares),
        **more,
    )


def new(number: int, token_ids: list[int], first_block: int, params: SamplingParams = GREEDY) -> NewSequence:
    """With blocks for 12 tokens."""
    return NewSequence(
        sequence_id=SequenceId(number),
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids),
        params=params,
        tables=(NewTable(tuple(BlockId(first_block + index) for index in range(3))),),
    )


def generate(driver: PlanDriver) -> list[list[int]]:
    numbers = [driver.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    driver.step({numbers[1]: 4})
    driver.generate(numbers[1:], 2)
    driver.generate(numbers, 4)
    driver.preempt(numbers[0])
    driver.generate(numbers, 5)
    driver.swap_out(numbers[1])
    driver.generate(numbers, NUM_TOKENS)
    if isinstance(driver, AheadDriver):
        driver.collect_all()
    return [driver.generated(number) for number in numbers]


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_in_flight_draw_the_tokens_of_steps_one_by_one(
    plain: Worker, ahead: Worker, depth: int
) -> None:
    """With penalties, bad words and seeds, in chunks, mixed, preempted and swapped."""
    alone = PlanDriver(plain, BLOCK_SIZE)
    expected = generate(alone)
    alone.release_all()
    driver = AheadDriver(ahead, BLOCK_SIZE, depth)
    assert generate(driver) == expected
    filled: Any = steps_of(ahead)._steps
    assert filled.num_filled > 2 * NUM_TOKENS, "most tokens were not known to the host"


def test_a_token_is_unknown_to_later_steps_until_it_is_collected(ahead: Worker) -> None:
    rows = steps_of(ahead).rows
    launched = ahead.launch(plan(new(1, [5, 6, 7], 1)))
    row = rows.row_of(SequenceId(1))
    assert rows.num_tokens_C[row] == 4
    assert rows.token_ids_CL[row, 3] == UNKNOWN_TOKEN
    output = launched.result()
    assert (rows.token_ids_CL[row, 3],) == output.token_ids[SequenceId(1)]
    assert launched.result() is output


def test_a_late_token_leaves_the_row_alone_that_another_sequence_has_by_then(ahead: Worker) -> None:
    rows = steps_of(ahead).rows
    first = ahead.launch(plan(new(1, [5, 6, 7], 1)))
    row = rows.row_of(SequenceId(1))
    second = ahead.launch(plan(new(2, [9, 8, 7], 4), released=(SequenceId(1),)))
    assert rows.row_of(SequenceId(2)) == row
    assert first.result().token_ids.keys() == {1}
    assert rows.token_ids_CL[row, :4].tolist() == [9, 8, 7, UNKNOWN_TOKEN]
    token = second.result().token_ids[SequenceId(2)][0]
    assert rows.token_ids_CL[row, :4].tolist() == [9, 8, 7, token]


def test_a_late_token_does_not_change_what_a_sequence_brought_when_it_came_again(ahead: Worker) -> None:
    rows = steps_of(ahead).rows
    first = ahead.launch(plan(new(1, [5, 6, 7], 1)))
    token = first.result().token_ids[SequenceId(1)][0]
    second = ahead.launch(plan(decodes=((1, 3),)))
    third = ahead.launch(plan(new(1, [5, 6, 7, token, 99], 4), released=(SequenceId(1),)))
    row = rows.row_of(SequenceId(1))
    assert second.result().token_ids[SequenceId(1)] != (99,)
    last = third.result().token_ids[SequenceId(1)][0]
    assert rows.token_ids_CL[row, :6].tolist() == [5, 6, 7, token, 99, last]
    assert rows.num_tokens_C[row] == 6


def test_a_sequence_that_fails_in_flight_fails_alone_and_its_next_step_harms_nobody(
    ahead: Worker, plain: Worker
) -> None:
    prompts = plan(new(1, [5, 6, 7], 1), new(2, [9, 8, 7], 4))
    expected = [
        plain.execute(step).token_ids[SequenceId(2)] for step in (prompts, plan(decodes=((1, 3), (2, 3))))
    ]
    plain.execute(plan(released=(SequenceId(1), SequenceId(2))))
    filled: Any = steps_of(ahead)._steps
    nan_for(0, filled)
    first = ahead.launch(prompts)
    second = ahead.launch(plan(decodes=((1, 3), (2, 3))))
    output = first.result()
    assert "not finite" in output.failures[SequenceId(1)]
    assert output.token_ids == {SequenceId(2): expected[0]}
    assert second.result().token_ids[SequenceId(2)] == expected[1]


def test_a_launch_that_raises_leaves_earlier_steps_to_be_collected(
    ahead: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ahead.launch(plan(new(1, [5, 6, 7], 1)))

    def explode(_: Any) -> None:
        raise RuntimeError("device-side assert")

    with monkeypatch.context() as patch:
        patch.setattr(steps_of(ahead)._steps, "compute", explode)
        with pytest.raises(RuntimeError, match="device-side"):
            ahead.launch(plan(decodes=((1, 3),)))
    token = first.result().token_ids[SequenceId(1)]
    rows = steps_of(ahead).rows
    assert rows.num_tokens_C[rows.row_of(SequenceId(1))] == 4, "the step that failed has drawn nothing"
    again = ahead.launch(plan(new(1, [5, 6, 7, *token], 4), released=(SequenceId(1),)))
    assert again.result().token_ids


def test_what_depends_on_unread_tokens_waits_for_them_with_the_device_already_busy(
    ahead: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    steps = steps_of(ahead)
    compute, learn = steps._steps.compute, steps.learn
    monkeypatch.setattr(steps._steps, "compute", lambda inputs: order.append("compute") or compute(inputs))
    monkeypatch.setattr(steps, "learn", lambda *args: order.append("learn") or learn(*args))
    penalised = SamplingParams(temperature=0.0, presence_penalty=1.0)
    first = ahead.launch(plan(new(1, [5, 6, 7], 1, penalised), new(2, [9, 9], 4)))
    second = ahead.launch(plan(decodes=((2, 2),)))
    assert order == ["compute", "compute"], "whoever has no penalties does not wait"
    third = ahead.launch(plan(decodes=((1, 3),)))
    assert order == ["compute", "compute", "compute", "learn", "learn"]
    for launched in (first, second, third):
        assert launched.result().token_ids


def test_copies_of_a_later_plan_come_after_the_computing_of_an_earlier_one(
    ahead: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    steps = steps_of(ahead)
    copier = steps._host_pool._copier
    compute, swap = steps._steps.compute, copier.swap
    monkeypatch.setattr(steps._steps, "compute", lambda inputs: order.append("compute") or compute(inputs))
    monkeypatch.setattr(copier, "swap", lambda *args: order.append("swap") or swap(*args))
    driver = AheadDriver(ahead, BLOCK_SIZE, depth=2)
    leaving, staying = driver.add(PROMPTS[0]), driver.add(PROMPTS[3])
    driver.step({leaving: None, staying: None})
    PlanDriver.swap_out(driver, leaving)
    driver.step({staying: None})
    assert order == ["compute", "swap", "compute"]
    driver.collect_all()


def test_out_of_memory_has_its_own_name_and_gives_memory_back_first(
    ahead: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    steps = steps_of(ahead)
    monkeypatch.setattr(steps.device, "release_cached_memory", lambda: released.append(True))

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    first = ahead.launch(plan(new(1, [5, 6, 7], 1)))
    with monkeypatch.context() as patch:
        patch.setattr(steps._steps, "compute", run_out)
        with pytest.raises(StepOutOfMemory, match=r"^CUDA out of memory$"):
            ahead.launch(plan(decodes=((1, 3),)))
    assert first.result().token_ids
    second = ahead.launch(plan(decodes=((1, 3),)))
    monkeypatch.setattr(second, "_collect", run_out)
    with pytest.raises(StepOutOfMemory):
        second.result()
    third = ahead.launch(plan(decodes=((1, 3),)))
    monkeypatch.setattr(steps, "propose", run_out)  # a pass of a draft model
    with pytest.raises(StepOutOfMemory):
        third.result()
    assert len(released) == 3


def test_a_step_on_a_cpu_is_computed_when_launch_returns(plain: Worker) -> None:
    launched = plain.launch(plan(new(1, [5, 6, 7], 1)))
    rows = steps_of(plain).rows
    row = rows.row_of(SequenceId(1))
    assert (rows.token_ids_CL[row, 3],) == launched.result().token_ids[SequenceId(1)]
    plain.execute(plan(released=(SequenceId(1),)))
