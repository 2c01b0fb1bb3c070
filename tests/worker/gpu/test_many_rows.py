"""The trial that chooses from how many rows on a product writes the numbers of its codes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.worker.quantized.random_weights import random_weight
from worker.devices.device import CpuDevice
from worker.gpu.quantized.products import CodeProduct
from worker.gpu.trials.many_rows import SIZES, choose_many_rows
from worker.model.linear import Linear
from worker.worker_config import WorkerConfig


class Stopwatch(CpuDevice):
    """Tells prepared times: of codes, then of numbers, for each size that is asked for."""

    def __init__(self, *times: float | None) -> None:
        super().__init__(WorkerConfig(model_path=""))
        self._times: Iterator[float | None] = iter(times)

    def seconds_of(self, work: Callable[[], Any]) -> float | None:
        work()
        time_s = next(self._times, "none")
        assert time_s != "none", "nobody should have asked again"
        return time_s  # type: ignore[return-value]

    @property
    def has_told_all(self) -> bool:
        return next(self._times, "none") == "none"


def product(num_outputs: int = 32) -> CodeProduct:
    return CodeProduct(Linear.of(random_weight("signed", num_outputs, 32, 32)))


@pytest.mark.parametrize(
    ("times", "fewest"),
    [
        ((2.0, 1.0), SIZES[0]),
        ((1.0, 2.0, 2.0, 1.0), SIZES[1]),
        ((1.0, 1.0, 1.0, 1.0, 1.01, 1.0), None),
        ((None,), None),
    ],
)
def test_numbers_are_taken_from_the_first_size_on_at_which_they_are_faster(
    times: tuple[float | None, ...], fewest: int | None
) -> None:
    alike = [product(), product()]
    watch = Stopwatch(*times)
    choose_many_rows(alike, watch, torch.float16)
    assert [each.fewest_by_numbers for each in alike] == [fewest] * 2
    assert watch.has_told_all


def test_each_kind_is_timed_by_itself() -> None:
    """The largest first."""
    one, other = product(64), product()
    choose_many_rows([one, other], Stopwatch(2.0, 1.0, *[1.0] * 6), torch.float16)
    assert (one.fewest_by_numbers, other.fewest_by_numbers) == (SIZES[0], None)


def test_float32_is_multiplied_by_codes_alone() -> None:
    alone = product()
    choose_many_rows([alone], Stopwatch(), torch.float32)
    assert alone.fewest_by_numbers is None
