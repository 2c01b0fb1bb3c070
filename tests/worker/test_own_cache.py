"""Families without a paged cache give what transformers gives, each sequence by itself."""

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.messages import SamplingParams
from tests.checkpoints import ALONE_FAMILIES
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import GREEDY, PlanDriver
from tests.worker.test_prompt_logprobs import check
from tests.worker.transformers_generate import NUM_TOKENS, expected
from worker.config import ModelFacts
from worker.errors import StartupError
from worker.worker import Worker

LONG = [(7 * index + 3) % 300 for index in range(29)]
SHORT = [40, 41, 42, 43, 44]
OTHER = [(11 * index + 5) % 300 for index in range(17)]


@pytest.fixture(scope="module", params=ALONE_FAMILIES)
def folder(request: pytest.FixtureRequest, checkpoints: MakeCheckpoint) -> Path:
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Worker, ModelFacts]:
    return load_worker(folder)


@pytest.fixture
def driver(loaded: tuple[Worker, ModelFacts]):
    driver = PlanDriver(loaded[0], BLOCK_SIZE)
    yield driver
    driver.release_all()


def test_neighbours_chunks_and_a_preemption_change_nothing(folder: Path, driver: PlanDriver) -> None:
    first, chunked, victim = (driver.add(prompt) for prompt in (SHORT, LONG, OTHER))
    driver.step({first: None, victim: None})
    for num_tokens in (6, 1, 13):
        driver.step({first: None, chunked: num_tokens, victim: None})
    driver.preempt(victim)
    driver.step({first: None})
    driver.generate([first, chunked, victim], NUM_TOKENS)
    for sequence, prompt in ((first, SHORT), (chunked, LONG), (victim, OTHER)):
        assert driver.generated(sequence)[:NUM_TOKENS] == expected(folder, tuple(prompt))


def test_a_prompt_in_chunks_is_scored_once_and_whole(folder: Path, driver: PlanDriver) -> None:
    sequence = driver.add(LONG, replace(GREEDY, num_prompt_logprobs=3))
    outputs = [driver.step({sequence: num_tokens}) for num_tokens in (9, 4)]
    outputs.append(driver.step({sequence: None}))
    found = [entry for output in outputs for entry in output.prompt_logprobs.get(sequence, ())]
    check(tuple(found), folder, LONG)
    assert not driver.step({sequence: None}).prompt_logprobs


def test_a_seed_draws_the_same_beside_others(driver: PlanDriver) -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    alone = driver.add(OTHER, params)
    driver.generate([alone], NUM_TOKENS)
    again, neighbour = driver.add(OTHER, params), driver.add(SHORT)
    driver.generate([again, neighbour], NUM_TOKENS)
    assert driver.generated(again) == driver.generated(alone)


def test_it_says_that_nothing_can_be_shared_or_swapped(
    folder: Path, loaded: tuple[Worker, ModelFacts]
) -> None:
    facts = loaded[1]
    assert not facts.is_paged
    assert facts.num_host_blocks == 0
    with pytest.raises(StartupError, match="--swap-space"):
        load_worker(folder, swap_space_bytes=1 << 20)


def test_states_that_do_not_fit_are_refused_with_the_number_that_would(checkpoints: MakeCheckpoint) -> None:
    with pytest.raises(StartupError, match=r"--max-num-seqs \d+ or less"):
        load_worker(checkpoints("mamba"), kv_cache_bytes=1 << 16, max_num_seqs=64)


def test_a_model_without_a_context_window_of_its_own_has_a_large_one(checkpoints: MakeCheckpoint) -> None:
    assert load_worker(checkpoints("mamba"))[1].max_model_len == 8192
    assert load_worker(checkpoints("mamba"), max_model_len=100)[1].max_model_len == 100
