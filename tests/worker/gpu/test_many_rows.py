"""The trials that choose how products by codes multiply how many rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.worker.quantized.random_weights import random_weight
from worker.devices.device import CpuDevice
from worker.gpu.quantized.float8_products import MOST_FEW_ROWS, Float8Product
from worker.gpu.quantized.products import CodeProduct
from worker.gpu.trials.many_rows import (
    SIZES,
    choose_few_rows,
    choose_many_rows,
    choose_tiles_by_time,
)
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
        assert time_s != "none", "there was one question too many"
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


@pytest.mark.parametrize(
    ("times", "most"),
    [
        ((2.0, 1.0, 2.0, 1.0), 64),
        ((2.0, 1.0, 1.0, 1.0), 32),
        ((1.0, 1.0), MOST_FEW_ROWS),
        ((None,), MOST_FEW_ROWS),
    ],
)
def test_rows_of_floats_are_multiplied_by_codes_up_to_the_last_size_at_which_that_is_faster(
    times: tuple[float | None, ...], most: int
) -> None:
    weight = replace(random_weight("float8", 48, 64, 64), scales_NG=torch.rand(48, 1) + 0.5)
    alike = [Float8Product(Linear.of(weight)) for _ in range(2)]
    watch = Stopwatch(*times)
    choose_few_rows(alike, watch, torch.float16)
    assert [each.most_few_rows for each in alike] == [most] * 2
    assert watch.has_told_all


def test_a_kernel_of_codes_that_is_wrong_is_not_taken_for_more_rows(monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    weight = replace(random_weight("float8", 48, 64, 64), scales_NG=torch.rand(48, 1) + 0.5)
    wrong = Float8Product(Linear.of(weight))
    multiply = wrong.multiply_few
    monkeypatch.setattr(Float8Product, "multiply_few", lambda _, x_TK: 1.1 * multiply(x_TK))
    choose_few_rows([wrong], Stopwatch(2.0), torch.float16)
    assert wrong.most_few_rows == MOST_FEW_ROWS
    assert "32: wrong by 1.0e-01" in caplog.text


def test_the_fastest_tiles_are_taken_for_each_number_of_rows_and_have_the_same_sums() -> None:
    alone, x_TK = product(), torch.randn(40, 32).half()
    expected = alone.multiply(x_TK)
    first, second = alone.other_tiles(64, torch.float16)
    [many] = alone.other_tiles(128, torch.float16)
    assert not alone.other_tiles(16, torch.float16)
    watch = Stopwatch(*(3.0, 2.0), *(2.0, 1.0), *(1.0, 1.0))
    choose_tiles_by_time([alone], watch, torch.float16)
    assert watch.has_told_all
    assert list(alone._taken_tiles.values()) == [second]
    for tiles in (first, second, many):
        assert torch.allclose(alone.multiply_by_tiles(x_TK, tiles), expected, rtol=1e-3, atol=1e-3)
    assert torch.allclose(alone.multiply(x_TK), expected, rtol=1e-3, atol=1e-3)


def test_numbers_that_are_wrong_are_not_taken(monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    alone = product()
    multiply = CodeProduct.multiply_by_numbers
    monkeypatch.setattr(CodeProduct, "multiply_by_numbers", lambda self, x_TK: 1.1 * multiply(self, x_TK))
    choose_many_rows([alone], Stopwatch(2.0, 2.0, 2.0), torch.float16)
    assert alone.fewest_by_numbers is None
    assert "64: wrong by 1.0e-01" in caplog.text
