"""Packed weights lie in large pages, and take no more memory for it than they have bytes."""

import mmap
from pathlib import Path

import pytest
import torch

from worker.cpu.packing.large_pages import LargePages

_MIB = 1 << 20


def test_tensors_lie_side_by_side_and_are_apart() -> None:
    pages = LargePages()
    shapes = [(3, 5), (0, 4), (7,), (64, 64)]
    made = [pages.zeros(shape, torch.int16) for shape in shapes]
    for number, tensor in enumerate(made):
        assert not tensor.any()
        tensor.fill_(number + 1)
    for number, (tensor, shape) in enumerate(zip(made, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        assert bool((tensor == number + 1).all())
    assert made[3].data_ptr() - made[0].data_ptr() < 4096


def test_a_large_tensor_is_freed_with_its_last_use() -> None:
    pages = LargePages()
    before = _resident_bytes()
    kept = pages.zeros((_MIB,), torch.uint8).fill_(1)
    large = pages.zeros((96, _MIB), torch.uint8).fill_(1)
    assert _resident_bytes() - before > 48 * _MIB
    del large
    assert _resident_bytes() - before < 48 * _MIB
    assert bool(kept.all())


def test_what_is_not_written_takes_no_memory() -> None:
    before = _resident_bytes()
    first = LargePages().zeros((_MIB,), torch.uint8).fill_(1)
    assert _resident_bytes() - before < 32 * _MIB
    assert first.data_ptr() % (2 * _MIB) == 0


def test_memory_that_is_not_there_is_named() -> None:
    with pytest.raises(MemoryError, match="packed weights"):
        LargePages().zeros((1 << 50,), torch.uint8)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("resident memory is read from /proc")
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE
