"""Drafts on a GPU, interpreted and late: tokens and log-probabilities of a CPU that verifies none."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from scheduler.config import PreemptionMode
from tests.checkpoints import make_checkpoint
from tests.worker.conftest import load_worker
from tests.worker.gpu.interpreted_gpu import HAS_GPU
from tests.worker.gpu.lazy_cuda import LazyCuda
from tests.worker.gpu.test_gpu_worker import load_gpu, steps_of
from tests.worker.gpu.test_lazy_cuda import load_lazy
from tests.worker.speculation.random_requests import TINY_REQUESTS
from tests.worker.speculation.speculated import Answer, Speculated, half_right, oracle
from worker.gpu import graphs
from worker.worker import Worker
from worker.worker_config import DraftMethod, ModelFacts, SpeculationConfig

pytestmark = pytest.mark.skipif(HAS_GPU, reason="near-equal logits are no equal logits there")

VOCAB = 335
DRAFTING = SpeculationConfig(method=DraftMethod.NGRAM, num_speculative_tokens=4, prompt_lookup_min=1)
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 40,
    "swap_space_bytes": 1 << 18,
    "speculation": DRAFTING,
}

Loaded = tuple[Worker, ModelFacts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("drafts"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Answer]:
    return Speculated(*load_worker(folder), WIDE).answers(TINY_REQUESTS)


WIDE: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
AHEAD = {**WIDE, "max_plans_in_flight": 2}


@pytest.fixture(scope="module")
def small_graphs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_MIXED", ())
        patch.setattr(graphs, "_DRAFTED", (4, 8))
        yield


@pytest.fixture(scope="module")
def gpu(folder: Path, small_graphs: None) -> Loaded:
    return load_gpu(folder, **OPTIONS)


@pytest.fixture(scope="module")
def lazy(folder: Path, small_graphs: None) -> Iterator[Loaded]:
    with LazyCuda() as cuda:
        cuda.start_order(3)
        yield load_lazy(folder, **OPTIONS)


def check_alike(found: list[Answer], expected: list[Answer]) -> None:
    for (tokens, reports, end), (same_tokens, same_reports, same_end) in zip(found, expected, strict=True):
        assert (tokens, end) == (same_tokens, same_end)
        assert [each.token_id for each in reports] == [each.token_id for each in same_reports]
        for one, other in zip(reports, same_reports, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_right_drafts_are_kept_and_graphs_compute_them(gpu: Loaded, expected: list[Answer]) -> None:
    worker, facts = gpu
    assert facts.max_drafts == DRAFTING.num_speculative_tokens
    world = Speculated(worker, facts, AHEAD)
    steps = steps_of(worker)
    steps._num_replayed = 0
    check_alike(world.answers(TINY_REQUESTS, oracle(expected, 3)), expected)
    assert world.num_accepted >= 12
    assert steps._num_replayed > 0


def test_half_right_drafts_change_nothing_with_preemption_and_steps_in_flight(
    gpu: Loaded, expected: list[Answer]
) -> None:
    world = Speculated(*gpu, {**AHEAD, "num_blocks": 7, "preemption_mode": PreemptionMode.SWAP}, next_id=100)
    check_alike(world.answers(TINY_REQUESTS, half_right(expected, Random(4), VOCAB)), expected)
    assert world.num_preemptions > 0
    assert 0 < world.num_accepted < world.num_drafted


@pytest.mark.night
def test_a_late_device_verifies_what_the_worker_itself_proposes(lazy: Loaded, expected: list[Answer]) -> None:
    class Own(Speculated):
        def _drafts(self, made_up: Any, result: Any) -> Any:
            return {**made_up, **result.draft_token_ids}

    world = Own(*lazy, AHEAD)
    right = oracle(expected, 3)
    guess = lambda number, generated: right(number, generated) if number % 2 else ()  # noqa: E731
    check_alike(world.answers(TINY_REQUESTS, guess), expected)
    assert world.num_accepted > 0
