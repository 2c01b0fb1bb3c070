"""A sequence that waited in the host's pool goes on as if it had never left."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.messages import (
    BlockCopy,
    BlockId,
    NewSequence,
    NewTable,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
)
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import GREEDY, PlanDriver
from tests.worker.transformers_generate import NUM_TOKENS, expected
from worker.worker import Worker
from worker.worker_errors import StartupError

# Longer than the sliding windows of 12 tokens.
LONG = [(7 * index + 3) % 300 for index in range(29)]
STRANGER = [(13 * index + 1) % 300 for index in range(40)]
OTHER = [(11 * index + 5) % 300 for index in range(17)]
SWAP_BYTES = 1 << 20


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])
def folder(request: pytest.FixtureRequest, checkpoints: MakeCheckpoint) -> Path:
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return load_worker(folder, swap_space_bytes=SWAP_BYTES, num_blocks=100)[0]


@pytest.fixture
def driver(worker: Worker) -> Iterator[PlanDriver]:
    driver = PlanDriver(worker, BLOCK_SIZE)
    yield driver
    driver.release_all()


def swap_out_and_overwrite(driver: PlanDriver, victim: int) -> None:
    """Let a stranger write over all of the victim's blocks, from the same plan on."""
    left = driver.blocks(victim)
    driver.swap_out(victim)
    stranger = driver.add(STRANGER)
    driver.generate([stranger], 3)
    assert set(left) <= set(driver.blocks(stranger))


def test_a_decode_goes_on_after_it_was_swapped(folder: Path, driver: PlanDriver) -> None:
    victim = driver.add(LONG)
    driver.generate([victim], 4)
    left = driver.blocks(victim)
    swap_out_and_overwrite(driver, victim)
    driver.generate([victim], NUM_TOKENS)
    assert set(left).isdisjoint(driver.blocks(victim))
    assert driver.generated(victim) == expected(folder, tuple(LONG))


@pytest.mark.parametrize("num_computed", [8, 13, 28])
def test_a_prompt_goes_on_after_it_was_swapped_half_way(
    folder: Path, driver: PlanDriver, num_computed: int
) -> None:
    victim = driver.add(LONG)
    driver.step({victim: num_computed})
    swap_out_and_overwrite(driver, victim)
    driver.step({victim: 1})
    driver.generate([victim], NUM_TOKENS)
    assert driver.generated(victim) == expected(folder, tuple(LONG))


def test_one_comes_back_in_the_plan_and_to_the_blocks_that_another_leaves(
    folder: Path, driver: PlanDriver
) -> None:
    first, second = driver.add(LONG), driver.add(OTHER)
    driver.generate([first, second], 3)
    driver.swap_out(second)
    driver.generate([first], 5)
    left = driver.blocks(first)
    driver.swap_out(first)
    driver.step({second: None})  # out and in at once
    assert set(driver.blocks(second)) & set(left)
    swap_out_and_overwrite(driver, second)
    driver.generate([first, second], NUM_TOKENS)
    assert driver.generated(first) == expected(folder, tuple(LONG))
    assert driver.generated(second) == expected(folder, tuple(OTHER))


def test_a_plan_may_swap_out_and_compute_nothing(folder: Path, driver: PlanDriver) -> None:
    victim = driver.add(LONG)
    driver.generate([victim], 2)
    driver.swap_out(victim)
    driver.step({})
    stranger = driver.add(STRANGER)
    driver.generate([stranger], 1)
    driver.generate([victim], NUM_TOKENS)
    assert driver.generated(victim) == expected(folder, tuple(LONG))


@pytest.fixture(scope="module")
def swapping_llama(checkpoints: MakeCheckpoint) -> Worker:
    return load_worker(checkpoints("llama"), swap_space_bytes=SWAP_BYTES)[0]


def test_a_seeded_draw_with_penalties_is_the_same_after_a_swap(swapping_llama: Worker) -> None:
    driver = PlanDriver(swapping_llama, BLOCK_SIZE)
    params = SamplingParams(temperature=1.5, seed=11, presence_penalty=0.5, repetition_penalty=1.2)
    alone = driver.add(OTHER, params)
    driver.generate([alone], 8)
    swapped = driver.add(OTHER, params)
    driver.generate([swapped], 4)
    swap_out_and_overwrite(driver, swapped)
    driver.generate([swapped], 8)
    assert driver.generated(swapped) == driver.generated(alone)
    driver.release_all()


def decode(sequence_id: int, block_id: int) -> tuple[NewSequence, ScheduledSequence]:
    """A sequence of two tokens, the first of which is said to be in the cache."""
    new = NewSequence(
        sequence_id=SequenceId(sequence_id),
        token_ids=(5, 6),
        num_prompt_tokens=2,
        params=GREEDY,
        tables=(NewTable((BlockId(block_id),)),),
    )
    return new, ScheduledSequence(SequenceId(sequence_id), 1, 1, samples=True)


def plan_of(*sequences: tuple[NewSequence, ScheduledSequence], back: tuple[int, int]) -> SchedulerOutput:
    return SchedulerOutput(
        step=0,
        released=(),
        new_sequences=tuple(new for new, _ in sequences),
        new_blocks={},
        scheduled=tuple(share for _, share in sequences),
        num_scheduled_tokens=len(sequences),
        swap_in=(BlockCopy(BlockId(back[0]), BlockId(back[1])),),
    )


@pytest.mark.parametrize("source", [-1, 0, 342, 1 << 40])
def test_a_host_block_out_of_range_fails_the_sequence_that_needs_it_alone(
    swapping_llama: Worker, source: int
) -> None:
    output = swapping_llama.execute(plan_of(decode(1, 3), decode(2, 4), back=(source, 3)))
    assert list(output.token_ids) == [2]
    assert output.failures == {1: "block 3: swapped in from a host block outside of 1 to 341"}
    swapping_llama.execute(plan_of(back=(1, 3))._replace(swap_in=(), released=(SequenceId(2),)))


@pytest.mark.parametrize("target", [-1, 0, 1 << 40])
def test_a_device_block_out_of_range_fails_the_sequence_that_has_it(
    swapping_llama: Worker, target: int
) -> None:
    output = swapping_llama.execute(plan_of(decode(1, target), back=(1, target)))
    assert output.token_ids == {}
    assert "a block outside of 1 to" in output.failures[SequenceId(1)]


def test_without_swap_space_whoever_is_swapped_in_fails(llama_worker: Worker) -> None:
    output = llama_worker.execute(plan_of(decode(1, 3), back=(1, 3)))
    assert output.failures == {1: "block 3: swapped in from a host block outside of 1 to 0"}


def test_what_could_not_leave_fails_when_it_comes_back(swapping_llama: Worker) -> None:
    plan = plan_of(decode(99, 7), back=(300, 7))._replace(swap_out=(BlockCopy(BlockId(0), BlockId(300)),))
    output = swapping_llama.execute(plan)
    assert output.failures == {
        99: "block 7: swapped in from host block 300, where nothing was swapped out to"
    }


def test_swap_space_is_counted_in_whole_blocks_beside_an_overridden_cache(
    checkpoints: MakeCheckpoint,
) -> None:
    _, facts = load_worker(checkpoints("llama"), num_blocks=5, swap_space_bytes=SWAP_BYTES)
    assert facts.num_blocks == 5
    assert facts.num_host_blocks == SWAP_BYTES // (facts.kv_cache_bytes // 6)
    assert 0 < facts.copy_s_per_block < 0.01


def test_without_swap_space_there_is_nothing_to_measure(checkpoints: MakeCheckpoint) -> None:
    _, facts = load_worker(checkpoints("llama"))
    assert (facts.num_host_blocks, facts.copy_s_per_block) == (0, 0.0)


@pytest.mark.parametrize("options", [{}, {"num_blocks": 8}, {"kv_cache_bytes": 1 << 20}])
def test_more_swap_space_than_memory_is_refused_with_the_option(
    checkpoints: MakeCheckpoint, options: dict[str, int]
) -> None:
    with pytest.raises(StartupError, match=r"swap space of 1048576.00 GiB do.*--swap-space"):
        load_worker(checkpoints("llama"), swap_space_bytes=1 << 50, **options)
