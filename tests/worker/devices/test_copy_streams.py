"""Copies beside steps, on streams that are done late: what waits for what, and what does not."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.late_streams import LateGpu, LateStream
from worker.devices.block_copies import Pools, RowCopy, TouchedRows
from worker.devices.copy_streams import CopyStreams

NUM_ROWS, NUM_HOST_ROWS, ROW_NUMEL = 8, 5, 2
ROW_BYTES = ROW_NUMEL * 8


class Bench:
    """Two pools, a copier that cuts pieces of two rows, and what both pools hold in the order of asking."""

    def __init__(self) -> None:
        self.gpu = LateGpu()
        numbers = torch.arange(NUM_ROWS * ROW_NUMEL)
        self.pools = Pools(
            numbers.view(NUM_ROWS, ROW_NUMEL), torch.full((NUM_HOST_ROWS, ROW_NUMEL), -1, dtype=torch.int64)
        )
        self.copier = CopyStreams(self.pools, self.gpu.streams, piece_bytes=2 * ROW_BYTES)
        self.device, self.host = self.pools.device_NE.clone(), self.pools.host_ME.clone()
        self._next = 1000

    def swap(self, out: Iterable[tuple[int, int]] = (), back: Iterable[tuple[int, int]] = ()) -> None:
        out, back = [RowCopy(*pair) for pair in out], [RowCopy(*pair) for pair in back]
        for source, target in out:
            self.host[target] = self.device[source]
        for source, target in back:
            self.device[target] = self.host[source]
        self.copier.swap(out, back)

    def step(self, writes: Iterable[int] = (), reads: Iterable[int] = ()) -> None:
        """One that reads first, and then writes something new."""
        writes, reads = list(writes), list(reads)
        touched = TouchedRows(np.array(writes, int), np.array([reads], int), np.array([len(reads)]))
        with self.copier.step(touched):
            for row in reads:
                held = self.device[row].clone()
                self.gpu.compute.ask(lambda row=row, held=held: self._check(row, held))
            for row in writes:
                self.device[row] = self._next
                self.gpu.compute.ask(lambda row=row, new=self._next: self.pools.device_NE[row].fill_(new))
                self._next += 1

    def check_end(self) -> None:
        assert torch.equal(self.pools.device_NE, self.device)
        assert torch.equal(self.pools.host_ME, self.host)

    def _check(self, row: int, held: torch.Tensor) -> None:
        assert torch.equal(self.pools.device_NE[row], held), f"a step read row {row} too early or too late"


@dataclass(frozen=True)
class Swap:
    out: dict[int, int]
    """Sources by target."""
    back: dict[int, int]


@dataclass(frozen=True)
class Compute:
    writes: frozenset[int]
    reads: frozenset[int]


@dataclass(frozen=True)
class Pass:
    """Time passes, for some of the streams."""

    seed: int


ROWS, HOST_ROWS = st.integers(0, NUM_ROWS - 1), st.integers(0, NUM_HOST_ROWS - 1)
SWAPS = st.builds(
    Swap,
    out=st.dictionaries(HOST_ROWS, ROWS, max_size=5),
    back=st.dictionaries(ROWS, HOST_ROWS, max_size=5),
)
STEPS = st.builds(Compute, writes=st.frozensets(ROWS, max_size=3), reads=st.frozensets(ROWS, max_size=4))
HISTORIES = st.lists(
    st.one_of(SWAPS, STEPS, st.builds(Pass, seed=st.integers(0, 10**6))), min_size=4, max_size=25
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(HISTORIES, st.permutations(range(4)))
def test_whatever_the_streams_do_first_it_is_as_if_all_were_done_in_the_order_of_asking(
    history: list[Swap | Compute | Pass], order: list[int]
) -> None:
    bench = Bench()
    for event in history:
        match event:
            case Swap(out, back):
                bench.swap([(row, at) for at, row in out.items()], [(at, row) for row, at in back.items()])
            case Compute(writes, reads):
                bench.step(writes, reads)
            case Pass(seed):
                bench.gpu.run_some(Random(seed))
    bench.gpu.finish(order)
    bench.check_end()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def stands_still(stream: LateStream) -> bool:
    """It cannot go on to its end."""
    while stream.go_on():
        pass
    return not stream.is_done


def test_a_step_runs_while_blocks_leave_that_it_does_not_write(bench: Bench) -> None:
    bench.swap(out=[(1, 0), (2, 1), (3, 2)])
    bench.step(writes=[4], reads=[1, 2, 5])
    bench.gpu.run([0])
    assert bench.gpu.compute.is_done
    bench.gpu.finish()
    bench.check_end()


def test_a_step_waits_for_the_piece_that_holds_its_block_and_not_for_those_behind(bench: Bench) -> None:
    bench.swap(out=[(5, 0), (3, 4), (1, 1), (2, 2)])
    bench.step(writes=[3])
    assert stands_still(bench.gpu.compute)
    while stands_still(bench.gpu.compute):
        assert bench.gpu.out.go_on()
    assert bench.pools.host_ME[1, 0] == -1, "the second piece has not begun"
    bench.gpu.finish()
    bench.check_end()


def test_what_leaves_is_remembered_over_later_steps(bench: Bench) -> None:
    bench.swap(out=[(1, 0)])
    for _ in range(3):
        bench.step(writes=[2])
    bench.step(writes=[1])
    bench.gpu.run([0])
    assert not bench.gpu.compute.is_done
    bench.gpu.finish()
    bench.check_end()


def test_what_has_left_is_forgotten(bench: Bench) -> None:
    bench.swap(out=[(1, 0)], back=[(0, 2)])
    bench.gpu.finish()
    bench.step(writes=[1], reads=[2])
    bench.gpu.finish()
    assert bench.gpu.compute.num_waits == 0
    bench.swap(out=[(2, 1)])
    assert bench.gpu.out.num_waits == bench.gpu.late_out.num_waits == 0


def test_blocks_leave_while_a_step_runs_but_for_those_that_it_writes(bench: Bench) -> None:
    bench.step(writes=[1], reads=[1, 2, 3])
    bench.swap(out=[(1, 0), (2, 1), (3, 2)])
    bench.gpu.run([1, 2, 3])
    assert bench.gpu.out.is_done
    assert bench.pools.host_ME[:3, 0].tolist() == [-1, 4, 6], "of 1 it is not known what it will hold"
    bench.step(writes=[1, 2])
    bench.gpu.finish()
    bench.check_end()


def test_blocks_return_while_a_step_runs_but_for_those_that_it_touches(bench: Bench) -> None:
    bench.swap(out=[(1, 0), (2, 1), (3, 2)])
    bench.gpu.finish()
    bench.step(writes=[4], reads=[5])
    bench.swap(back=[(0, 5), (1, 6), (2, 7)])
    bench.gpu.run([3])
    assert bench.pools.device_NE[6:, 0].tolist() == [4, 6]
    assert bench.pools.device_NE[5, 0] == 10, "a step may still read it"
    bench.gpu.finish()
    bench.check_end()


def test_a_step_waits_for_what_it_reads_to_return_and_for_nothing_else(bench: Bench) -> None:
    bench.swap(out=[(1, 0), (2, 1)])
    bench.gpu.finish()
    bench.swap(back=[(0, 5), (1, 6)])
    bench.step(reads=[7])
    bench.gpu.run([0])
    assert bench.gpu.compute.is_done
    bench.step(reads=[6])
    assert stands_still(bench.gpu.compute)
    bench.gpu.finish()


def test_a_host_block_is_read_before_something_else_comes_to_it(bench: Bench) -> None:
    """A sequence returns, its host blocks are free, and the next one is swapped out to them."""
    bench.swap(out=[(1, 0)])
    bench.gpu.finish()
    bench.swap(back=[(0, 2)])
    bench.swap(out=[(3, 0)])
    bench.gpu.run([1, 2])
    assert not (bench.gpu.out.is_done and bench.gpu.late_out.is_done)
    bench.gpu.finish()
    bench.check_end()


def test_entries_of_a_table_behind_its_end_are_not_read(bench: Bench) -> None:
    touched = TouchedRows(np.array([1]), np.array([[1, 2, 9], [3, 0, 4]]), np.array([2, 1]))
    assert sorted(touched.read().tolist()) == [1, 2, 3]


def test_a_copy_that_is_refused_leaves_those_before_it_in_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = bench.gpu.out.copy

    def copy_one_and_refuse(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        copy(pairs[:1])
        raise RuntimeError("no more of this")

    monkeypatch.setattr(bench.gpu.out, "copy", copy_one_and_refuse)
    with pytest.raises(RuntimeError, match="no more"):
        bench.copier.swap([RowCopy(1, 0), RowCopy(3, 1)], [])
    bench.step(writes=[1])
    assert stands_still(bench.gpu.compute)
    bench.gpu.finish()
    assert bench.pools.host_ME[0].tolist() == [2, 3]


def test_a_step_that_fails_half_way_is_still_in_the_way(bench: Bench) -> None:
    touched = TouchedRows(np.array([1]), np.array([[2]]), np.array([1]))
    with suppress(ZeroDivisionError), bench.copier.step(touched):
        bench.gpu.compute.ask(lambda: bench.pools.device_NE[1].fill_(7))
        raise ZeroDivisionError
    bench.copier.swap([RowCopy(1, 0)], [])
    bench.gpu.finish(order=[3, 2, 1, 0])
    assert bench.pools.host_ME[0].tolist() == [7, 7]
