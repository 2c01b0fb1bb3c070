"""Promises of the worker about a step beside its tokens: who fails, who goes on, what is remembered."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scheduler.messages import (
    BlockId,
    NewSequence,
    NewTable,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
)
from tests.checkpoints import make_checkpoint
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import GREEDY, PlanDriver
from worker.worker import Worker
from worker.worker_config import LoadProgress, WorkerConfig

PROMPT = [10, 20, 30, 40, 50, 60, 70]
OTHER = [200, 100, 3]
EMPTY_PLAN = SchedulerOutput(
    step=0, released=(), new_sequences=(), new_blocks={}, scheduled=(), num_scheduled_tokens=0
)
POISON = 299


@pytest.fixture(scope="module")
def poisoned_worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """Token POISON has an embedding of NaN."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("poisoned"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return load_worker(folder)[0]


def new_sequence(sequence_id: int, token_ids: list[int], block_ids: list[int]) -> NewSequence:
    return NewSequence(
        sequence_id=SequenceId(sequence_id),
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids),
        params=GREEDY,
        tables=(NewTable(tuple(BlockId(each) for each in block_ids)),),
    )


def admission(*new: NewSequence) -> SchedulerOutput:
    """Plan the whole prompt of each."""
    return EMPTY_PLAN._replace(
        new_sequences=new,
        scheduled=tuple(
            ScheduledSequence(each.sequence_id, 0, len(each.token_ids), samples=True) for each in new
        ),
        num_scheduled_tokens=sum(len(each.token_ids) for each in new),
    )


def release(*sequence_ids: int) -> SchedulerOutput:
    return EMPTY_PLAN._replace(released=tuple(SequenceId(each) for each in sequence_ids))


def test_a_sequence_with_nan_logits_fails_and_its_neighbour_does_not(poisoned_worker: Worker) -> None:
    driver = PlanDriver(poisoned_worker, BLOCK_SIZE)
    alone = driver.add(PROMPT)
    driver.generate([alone], 5)
    healthy, sick = driver.add(PROMPT), driver.add([1, POISON, 2, 3])
    output = driver.step({healthy: None, sick: None})
    assert list(output.failures) == [sick]
    assert list(output.token_ids) == [healthy]
    driver.generate([healthy], 5)
    assert driver.generated(healthy) == driver.generated(alone)
    driver.release_all()


def test_a_scored_prompt_with_nan_logits_fails_and_its_neighbour_does_not(poisoned_worker: Worker) -> None:
    driver = PlanDriver(poisoned_worker, BLOCK_SIZE)
    asking = replace(GREEDY, num_prompt_logprobs=0)
    healthy, sick = driver.add(PROMPT, asking), driver.add([1, POISON, 2, 3], asking)
    output = driver.step({healthy: None, sick: 2})  # nothing is drawn yet for the sick one
    assert list(output.failures) == [sick]
    assert list(output.token_ids) == [healthy]
    assert len(output.prompt_logprobs[healthy]) == len(PROMPT) - 1
    driver.release_all()


def test_nan_left_in_a_freed_block_does_not_reach_its_next_owner(poisoned_worker: Worker) -> None:
    driver = PlanDriver(poisoned_worker, BLOCK_SIZE)
    expected = driver.add(PROMPT)
    driver.generate([expected], 6)
    driver.restart_blocks()
    sick = driver.add([POISON] * 16)
    assert driver.step({sick: None}).failures
    driver.restart_blocks()
    heir, beside = driver.add(PROMPT), driver.add(OTHER)
    driver.generate([heir, beside], 6)
    assert driver.generated(heir) == driver.generated(expected)
    driver.release_all()


@pytest.mark.parametrize("token_id", [-1, 335, 2**31])
def test_a_token_outside_of_the_vocabulary_fails_its_sequence_alone(
    llama_worker: Worker, token_id: int
) -> None:
    good, bad = new_sequence(1, PROMPT, [1, 2]), new_sequence(2, [5, token_id], [3])
    output = llama_worker.execute(admission(bad, good))
    assert list(output.token_ids) == [good.sequence_id]
    assert str(token_id) in output.failures[bad.sequence_id]
    llama_worker.execute(release(1, 2))


@pytest.mark.parametrize(
    ("blocks", "share", "reason"),
    [
        ([3], ScheduledSequence(SequenceId(2), 0, 7, samples=True), "blocks end at 4"),
        ([3, 4], ScheduledSequence(SequenceId(2), 0, 8, samples=True), "has 7 tokens"),
        ([3, 4], ScheduledSequence(SequenceId(2), -1, 3, samples=False), "from position -1"),
        ([3, 4], ScheduledSequence(SequenceId(2), 3, 0, samples=False), "for 0 tokens"),
        ([0, 3], ScheduledSequence(SequenceId(2), 0, 7, samples=True), "a block outside of 1 to"),
        ([3, 10**6], ScheduledSequence(SequenceId(2), 0, 7, samples=True), "a block outside of 1 to"),
    ],
)
def test_a_plan_that_is_wrong_about_one_sequence_fails_that_one(
    llama_worker: Worker, blocks: list[int], share: ScheduledSequence, reason: str
) -> None:
    plan = admission(new_sequence(1, PROMPT, [1, 2]), new_sequence(2, PROMPT, blocks))
    output = llama_worker.execute(plan._replace(scheduled=(plan.scheduled[0], share)))
    assert list(output.token_ids) == [1]
    assert reason in output.failures[SequenceId(2)]
    llama_worker.execute(release(1, 2))


def test_a_sequence_that_was_never_sent_fails_and_an_unknown_release_is_ignored(llama_worker: Worker) -> None:
    share = ScheduledSequence(SequenceId(77), 0, 1, samples=True)
    plan = release(77, 78)._replace(scheduled=(share,), new_blocks={SequenceId(79): ((BlockId(1),),)})
    output = llama_worker.execute(plan)
    assert set(output.failures) == {77, 79}
    assert output.token_ids == {}


def test_more_sequences_than_rows_fail_one_by_one_until_rows_are_free(llama_worker: Worker) -> None:
    everyone = [new_sequence(index, OTHER, [index + 1]) for index in range(10)]
    output = llama_worker.execute(admission(*everyone))
    assert list(output.failures) == [8, 9]
    again = llama_worker.execute(admission(everyone[8])._replace(released=(SequenceId(0),)))
    assert list(again.token_ids) == [8]
    llama_worker.execute(release(*range(10)))


def test_a_prompt_longer_than_max_model_len_fails(checkpoints: MakeCheckpoint) -> None:
    worker, facts = load_worker(checkpoints("llama"), max_model_len=8)
    assert facts.max_model_len == 8
    output = worker.execute(admission(new_sequence(1, [5] * 9, [1, 2, 3]), new_sequence(2, [5] * 8, [4, 5])))
    assert list(output.token_ids) == [2]
    assert "max_model_len is 8" in output.failures[SequenceId(1)]


def test_a_sequence_sent_again_without_release_starts_anew(llama_worker: Worker) -> None:
    first = llama_worker.execute(admission(new_sequence(1, PROMPT, [1, 2])))
    for _ in range(8):  # as many as there are rows: none may be lost
        again = llama_worker.execute(admission(new_sequence(1, PROMPT, [3, 4])))
        assert again.token_ids == first.token_ids
    llama_worker.execute(release(1))


def test_an_empty_plan_gives_an_empty_output(llama_worker: Worker) -> None:
    output = llama_worker.execute(EMPTY_PLAN)
    assert (output.token_ids, output.logprobs, output.failures) == ({}, {}, {})


def test_a_step_of_unfinished_prompts_draws_nothing(llama: PlanDriver) -> None:
    sequence = llama.add(PROMPT)
    assert llama.step({sequence: 3}).token_ids == {}
    assert list(llama.step({sequence: None}).token_ids) == [sequence]


def test_logprobs_come_for_the_sequence_that_asked(llama: PlanDriver) -> None:
    asking, silent = llama.add(PROMPT, replace(GREEDY, num_logprobs=2)), llama.add(PROMPT)
    output = llama.step({silent: None, asking: None})
    assert list(output.logprobs) == [asking]
    (entry,) = output.logprobs[SequenceId(asking)]
    assert (entry.token_id,) == output.token_ids[SequenceId(asking)]
    assert entry.rank == 1
    assert len(entry.top) == 2


def test_a_seeded_draw_is_the_same_after_preemption_and_beside_others(llama: PlanDriver) -> None:
    params = SamplingParams(temperature=1.5, seed=11, presence_penalty=0.5)
    alone = llama.add(PROMPT, params)
    llama.generate([alone], 8)
    preempted, stranger = llama.add(PROMPT, params), llama.add(OTHER, replace(params, seed=12))
    for _ in range(4):
        llama.step({stranger: None, preempted: None})
    llama.preempt(preempted)
    llama.generate([preempted, stranger], 8)
    assert llama.generated(preempted) == llama.generated(alone)
    assert llama.generated(stranger) != llama.generated(alone)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_draws_what_single_precision_thinks_likely(
    checkpoints: MakeCheckpoint, dtype: str
) -> None:
    """Random weights leave little between the best tokens, so rounding may swap neighbours in rank."""
    single, _ = load_worker(checkpoints("llama"))
    half, facts = load_worker(checkpoints("llama"), dtype=dtype)
    assert facts.dtype == dtype
    driver, judge = PlanDriver(half, BLOCK_SIZE), PlanDriver(single, BLOCK_SIZE)
    sequences = [driver.add(PROMPT), driver.add(OTHER)]
    driver.generate(sequences, 8)
    for sequence, prompt in zip(sequences, (PROMPT, OTHER), strict=True):
        for num_seen, token_id in enumerate(driver.generated(sequence)):
            seen = [*prompt, *driver.generated(sequence)[:num_seen]]
            judged = judge.add(seen, replace(GREEDY, num_logprobs=4))
            (entry,) = judge.step({judged: None}).logprobs[SequenceId(judged)]
            assert token_id in dict(entry.top)
            judge.release_all()


def test_the_longest_sequence_runs_to_its_last_token(checkpoints: MakeCheckpoint) -> None:
    worker, facts = load_worker(checkpoints("gpt2"), max_model_len=12, num_blocks=3)
    driver = PlanDriver(worker, BLOCK_SIZE)
    sequence = driver.add(PROMPT)
    driver.generate([sequence], facts.max_model_len - len(PROMPT) + 1)
    assert len(driver.generated(sequence)) == 6


def test_loading_reports_in_the_calling_thread_and_is_not_over_before_it_is_ready(
    checkpoints: MakeCheckpoint,
) -> None:
    reports: list[LoadProgress] = []
    folder: Path = checkpoints("llama")
    worker = Worker(WorkerConfig(model_path=str(folder), device="cpu", num_threads=1, num_blocks=4))
    facts = worker.load(reports.append)
    assert reports[-1].stage == "warming up"
    fractions = [report.fraction for report in reports]
    assert fractions == sorted(fractions)
    assert 0.8 < fractions[-1] < 1.0
    assert (facts.block_size, facts.num_blocks, facts.max_model_len) == (32, 4, 128)
    assert facts.device == "cpu (1 thread)"
    assert facts.weight_bytes == facts.num_parameters * 4
    worker.close()
