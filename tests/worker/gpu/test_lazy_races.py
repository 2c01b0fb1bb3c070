"""Races that are planted into the GPU worker: the lazy device shows each of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

import worker.devices.device
from tests.checkpoints import make_checkpoint
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.gpu.ahead import AheadDriver
from tests.worker.gpu.interpreted_gpu import HAS_GPU
from tests.worker.gpu.lazy_cuda import LazyCuda
from tests.worker.gpu.lazy_driver import LazyDriver
from tests.worker.gpu.test_launch import generate
from tests.worker.gpu.test_lazy_cuda import expected_from, load_lazy
from worker.gpu import step_buffers
from worker.gpu.sampling.gpu_sampler import GpuSampler

LATEST, AT_ONCE = None, 2
"""A device that is slower than the host, and one that is faster: each shows what the other hides."""

pytestmark = [pytest.mark.night, pytest.mark.skipif(HAS_GPU, reason="it stands for one")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("races"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return expected_from(load_worker(folder, swap_space_bytes=1 << 20)[0], generate)


def _let_streams_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LazyDriver, "let_wait", lambda *_: None)


def _write_pinned_memory_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_buffers._Staging, "wait", lambda _: None)


def _read_results_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker.devices.device._CudaEvent, "wait", lambda _: None)


def _keep_one_place_for_results(patch: pytest.MonkeyPatch) -> None:
    download = GpuSampler._download_outcome

    def keep(sampler: GpuSampler) -> Tensor:
        place = download(sampler)
        sampler._free_results.append(place)
        return place

    patch.setattr(GpuSampler, "_download_outcome", keep)


@pytest.mark.parametrize(
    ("plant", "seed"),
    [
        (_let_streams_pass, LATEST),
        (_write_pinned_memory_too_early, LATEST),
        (_read_results_too_early, LATEST),
        (_keep_one_place_for_results, AT_ONCE),
    ],
)
def test_a_planted_race_shows_in_the_tokens(
    folder: Path, expected: list[list[int]], plant: Callable[[pytest.MonkeyPatch], None], seed: int | None
) -> None:
    with LazyCuda(seed=seed), pytest.MonkeyPatch.context() as patch:
        racing, _ = load_lazy(folder, enforce_eager=True)
        plant(patch)
        try:
            found = generate(AheadDriver(racing, BLOCK_SIZE, depth=3))
        except (AssertionError, RuntimeError, ValueError):
            return  # poison where a token, an index or a probability should be
    assert found != expected
