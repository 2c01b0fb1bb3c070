"""Ranks exchange sums, parts and numbers, here in the threads of one process."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from tests.worker.ranks.conftest import SIZE
from worker.ranks.places import PAGE_BYTES
from worker.ranks.ranks import ExchangeTimes
from worker.ranks.shared_ranks import SharedRanks
from worker.worker_errors import StartupError

# None, one, some, exactly one part of the page, and more than two parts.
LENGTHS = (0, 1, 576, 100_003, PAGE_BYTES // (2 * SIZE * 4), PAGE_BYTES // 8 + 5)

_LATE_S = 0.05
_MARK_BYTES = 128

Result = TypeVar("Result")


def together(three: list[SharedRanks], work: Callable[[SharedRanks], Result]) -> list[Result]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(work, three))


def numbers_of(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_added_in_the_order_of_ranks_with_the_same_bits_on_each(
    three: list[SharedRanks], length: int
) -> None:
    def reduce(ranks: SharedRanks) -> torch.Tensor:
        sums = numbers_of(ranks.rank, length)
        ranks.reduce(sums)
        return sums

    expected = numbers_of(0, length)
    for rank in range(1, SIZE):
        expected = expected + numbers_of(rank, length)
    for found in together(three, reduce):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 700])
def test_each_rank_gets_the_parts_side_by_side(three: list[SharedRanks], num_rows: int) -> None:
    parts = [numbers_of(rank, num_rows * 1001).view(num_rows, 1001) for rank in range(SIZE)]
    for found in together(three, lambda ranks: ranks.gather(parts[ranks.rank])):
        assert torch.equal(found, torch.cat(parts, dim=1))


def test_the_time_of_an_exchange_is_told_from_waiting_for_a_later_rank(three: list[SharedRanks]) -> None:
    def work(ranks: SharedRanks) -> tuple[ExchangeTimes, float]:
        if ranks.rank == 2:
            until_others_sleep(ranks)
            time.sleep(_LATE_S)
        before, started_s = ranks.times(), time.monotonic()
        ranks.reduce(torch.ones(1000))
        whole_s = time.monotonic() - started_s
        return ExchangeTimes(*(now - then for now, then in zip(ranks.times(), before, strict=True))), whole_s

    (first, first_whole_s), _, (late, _) = together(three, work)
    assert first.wait_s >= _LATE_S, "it slept already when rank 2 began to be late"
    assert late.wait_s < first.wait_s
    assert late.exchange_s > 0
    assert 0 < first.exchange_s <= first_whole_s - first.wait_s


def until_others_sleep(ranks: SharedRanks) -> None:
    """Wait until all others sleep until this rank comes: their number stands behind its turn in the page."""
    place = ranks.rank * _MARK_BYTES + 4
    while ranks._page[place] < SIZE - 1:
        time.sleep(0)


def test_many_exchanges_of_different_kinds_stay_in_step(three: list[SharedRanks]) -> None:
    def work(ranks: SharedRanks) -> list[int]:
        found = []
        for turn in range(300):
            sums = torch.full((1 + turn % 7,), float(ranks.rank + turn))
            ranks.reduce(sums)
            found.append(int(sums[-1]))
            found += ranks.broadcast([turn + 100 * ranks.rank] * (turn % 3))
        return found

    first, *others = together(three, work)
    assert all(each == first for each in others)
    assert first[:4] == [3, 6, 1, 9]


def test_the_smallest_number_is_agreed_on(three: list[SharedRanks]) -> None:
    assert together(three, lambda ranks: ranks.agree_min(90 - ranks.rank)) == [88] * SIZE


def test_ranks_that_differ_are_refused_on_each_of_them(three: list[SharedRanks]) -> None:
    together(three, lambda ranks: ranks.check_same("checkpoint", "the same on all"))

    def differ(ranks: SharedRanks) -> str:
        with pytest.raises(StartupError) as refusal:
            ranks.check_same("checkpoint", "old" if ranks.rank == 2 else "new")
        return refusal.value.what

    first, _, last = together(three, differ)
    assert first == "ranks 0 and 2 differ in checkpoint; on rank 0 it is: new"
    assert last == "ranks 0 and 2 differ in checkpoint; on rank 2 it is: old"
