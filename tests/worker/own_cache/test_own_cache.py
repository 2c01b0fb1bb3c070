"""Families without a paged cache give what transformers gives, each sequence by itself."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from scheduler.messages import SamplingParams
from tests.checkpoints import ALONE_FAMILIES, make_checkpoint
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import GREEDY, PlanDriver
from tests.worker.steps.test_prompt_logprobs import check
from tests.worker.transformers_generate import NUM_TOKENS, expected
from worker.devices.device import CpuDevice
from worker.load import recurrent_functions
from worker.own_cache.model import OwnCacheModel
from worker.worker import Worker
from worker.worker_config import ModelFacts
from worker.worker_errors import StartupError, StepOutOfMemory, WorkerError

LONG = [(7 * index + 3) % 300 for index in range(29)]
SHORT = [40, 41, 42, 43, 44]
OTHER = [(11 * index + 5) % 300 for index in range(17)]


@pytest.fixture(scope="module", autouse=True)
def without_states() -> Iterator[None]:
    """Recurrent layers have no batches here, as on GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent_functions, "_FUNCTIONS", {})
        yield


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


def test_layers_that_do_not_tell_how_long_they_need_a_token_are_computed_alone_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint("llama", tmp_path, sliding_window=5)
    worker, facts = load_worker(folder)
    assert not facts.is_paged
    assert "llama asks for a sliding window that its layers do not tell of" in caplog.text
    assert "transformers alone computes, one sequence after the other" in caplog.text
    driver = PlanDriver(worker, BLOCK_SIZE)
    sequence, ids = driver.add(LONG), list(LONG)
    driver.generate([sequence], NUM_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for _ in range(NUM_TOKENS):  # transformers' cache would have a window that its attention has not
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert driver.generated(sequence) == ids[len(LONG) :]


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
        load_worker(checkpoints("lfm2"), kv_cache_bytes=1 << 16, max_num_seqs=64)


def test_a_model_without_a_context_window_of_its_own_has_a_large_one(checkpoints: MakeCheckpoint) -> None:
    assert load_worker(checkpoints("mamba"))[1].max_model_len == 8192
    assert load_worker(checkpoints("mamba"), max_model_len=100)[1].max_model_len == 100


@pytest.mark.parametrize("keeps_caches", [None, False])
def test_a_prompt_of_which_one_token_comes_later_is_scored_once_and_whole(
    folder: Path, driver: PlanDriver, keeps_caches: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if keeps_caches is not None:
        steps: Any = driver._worker._steps
        monkeypatch.setattr(steps, "_keeps_caches", keeps_caches)
    sequence = driver.add(LONG, replace(GREEDY, num_prompt_logprobs=3))
    outputs = [driver.step({sequence: num_tokens}) for num_tokens in (len(LONG) - 1, None, None)]
    found = [entry for output in outputs for entry in output.prompt_logprobs.get(sequence, ())]
    check(tuple(found), folder, LONG)


class Fragile:
    """A model that fails on sequences that begin with one of some tokens."""

    def __init__(self, model: OwnCacheModel, error: Exception, *firsts: int) -> None:
        self._model, self._error, self._firsts = model, error, firsts

    def compute(self, token_ids: list[int], *args: Any, **options: Any) -> Tensor:
        if token_ids[0] in self._firsts:
            raise self._error
        return self._model.compute(token_ids, *args, **options)


def break_model(driver: PlanDriver, monkeypatch: pytest.MonkeyPatch, error: Exception, *firsts: int) -> None:
    steps: Any = driver._worker._steps
    monkeypatch.setattr(steps, "_model", Fragile(steps._model, error, *firsts))


def test_one_that_the_model_fails_on_fails_alone_and_tells_no_client_why(
    folder: Path, driver: PlanDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_model(driver, monkeypatch, RuntimeError("planted in /some/file.py"), LONG[0])
    bad, good = driver.add(LONG), driver.add(SHORT)
    output = driver.step({bad: None, good: None})
    assert output.failures == {bad: "the model failed on this request"}
    driver.generate([good], NUM_TOKENS)
    assert driver.generated(good)[:NUM_TOKENS] == expected(folder, tuple(SHORT))


def test_a_step_of_which_nothing_can_be_computed_counts_as_failed(
    driver: PlanDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_model(driver, monkeypatch, RuntimeError("planted"), LONG[0], SHORT[0])
    with pytest.raises(WorkerError, match="all 2 sequences"):
        driver.step({driver.add(LONG): None, driver.add(SHORT): None})


def test_a_step_without_memory_is_told_as_that_whoever_asked_for_too_much(
    driver: PlanDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_model(driver, monkeypatch, torch.OutOfMemoryError("planted"), LONG[0])
    with pytest.raises(StepOutOfMemory):
        driver.step({driver.add(SHORT): None, driver.add(LONG): None})


def test_a_prompt_whose_scores_are_no_numbers_fails_alone(
    driver: PlanDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blind(OwnCacheModel):
        def __init__(self, model: OwnCacheModel) -> None:
            self._seeing = model

        def compute(self, token_ids: list[int], *args: Any, **options: Any) -> Tensor:
            logits_TV = self._seeing.compute(token_ids, *args, **options)
            return logits_TV * float("nan") if token_ids[0] == LONG[0] else logits_TV

    steps: Any = driver._worker._steps
    monkeypatch.setattr(steps, "_model", Blind(steps._model))
    asking, other = driver.add(LONG, replace(GREEDY, num_prompt_logprobs=0)), driver.add(SHORT)
    output = driver.step({asking: None, other: None})
    assert output.failures == {asking: "logits of the prompt are not finite"}
    assert not output.prompt_logprobs
    assert output.token_ids.keys() == {other}


@pytest.mark.parametrize("max_model_len", [None, 48])
def test_no_longer_step_is_tried_at_start_than_can_come(
    checkpoints: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, max_model_len: int | None
) -> None:
    lengths: list[int] = []
    compute = OwnCacheModel.compute

    def noting(self: OwnCacheModel, token_ids: list[int], *args: Any, **options: Any) -> Tensor:
        lengths.append(len(token_ids))
        return compute(self, token_ids, *args, **options)

    def running(self: CpuDevice, run_largest_step: Callable[[], None], **_: object) -> int:
        run_largest_step()
        return 1 << 30

    monkeypatch.setattr(OwnCacheModel, "compute", noting)
    monkeypatch.setattr(CpuDevice, "kv_cache_budget_bytes", running)
    _, facts = load_worker(checkpoints("bloom"), max_model_len=max_model_len, max_num_batched_tokens=1 << 14)
    assert max(lengths) == facts.max_model_len
