"""Each family gives what transformers' own generate gives, however its steps are cut and mixed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import PlanDriver
from tests.worker.transformers_generate import NUM_TOKENS, expected
from worker.worker import Worker

# Longer than the families' sliding windows of 12 tokens, shorter than the window, and in between.
LONG = [(7 * index + 3) % 300 for index in range(29)]
SHORT = [40, 41, 42, 43, 44]
OTHER = [(11 * index + 5) % 300 for index in range(17)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, checkpoints: MakeCheckpoint) -> Path:
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return load_worker(folder)[0]


@pytest.fixture
def driver(worker: Worker) -> Iterator[PlanDriver]:
    driver = PlanDriver(worker, BLOCK_SIZE)
    yield driver
    driver.release_all()


def test_alone_it_generates_what_transformers_generates(folder: Path, driver: PlanDriver) -> None:
    sequence = driver.add(LONG)
    driver.generate([sequence], NUM_TOKENS)
    assert driver.generated(sequence) == expected(folder, tuple(LONG))


def test_neighbours_of_other_lengths_change_nothing(folder: Path, driver: PlanDriver) -> None:
    prompts = [LONG, SHORT, OTHER]
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.step({sequences[0]: None})  # then one decodes while the others prefill
    driver.generate(sequences, NUM_TOKENS)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert driver.generated(sequence) == expected(folder, tuple(prompt))


def test_a_prompt_computed_in_chunks_beside_a_decode_gives_the_same_tokens(
    folder: Path, driver: PlanDriver
) -> None:
    decoding, chunked = driver.add(SHORT), driver.add(LONG)
    driver.step({decoding: None})
    for num_tokens in (6, 1, 13):  # in either order; the chunk of one token passes for a decode
        output = driver.step({chunked: num_tokens, decoding: None})
        assert list(output.token_ids) == [decoding]
    driver.generate([decoding, chunked], NUM_TOKENS)
    assert driver.generated(chunked) == expected(folder, tuple(LONG))
    assert driver.generated(decoding)[:NUM_TOKENS] == expected(folder, tuple(SHORT))


def test_a_preempted_sequence_goes_on_where_it_was(folder: Path, driver: PlanDriver) -> None:
    victim, other = driver.add(LONG), driver.add(OTHER)
    for _ in range(4):
        driver.step({victim: None, other: None})
    driver.preempt(victim)
    driver.step({other: None})
    driver.generate([victim, other], NUM_TOKENS)
    assert driver.generated(victim) == expected(folder, tuple(LONG))


def test_a_prefix_left_by_an_earlier_step_is_used(folder: Path, driver: PlanDriver) -> None:
    first = driver.add(LONG)
    driver.generate([first], 2)
    second = driver.add([*LONG[:22], *SHORT], shares_with=first)
    driver.generate([first, second], NUM_TOKENS)
    assert driver.generated(second) == expected(folder, (*LONG[:22], *SHORT))


def test_a_prefix_filled_in_the_same_step_is_used(folder: Path, driver: PlanDriver) -> None:
    prompt = [*LONG[:22], *SHORT]
    owner = driver.add(LONG)
    sharer = driver.add(prompt, shares_with=owner)
    # The sharer stands first in the plan, and must still find what the owner writes in this step.
    output = driver.step({sharer: None, owner: None})
    assert len(output.token_ids) == 2
    driver.generate([sharer, owner], NUM_TOKENS)
    assert driver.generated(owner) == expected(folder, tuple(LONG))
    assert driver.generated(sharer) == expected(folder, tuple(prompt))
