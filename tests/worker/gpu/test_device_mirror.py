"""The way of a test's tensors to a GPU and back; here the other device is the CPU once more."""

from typing import Any

import torch

from tests.worker.gpu.device_mirror import DeviceMirror, mirrored

CPU = torch.device("cpu")


def test_what_a_kernel_writes_on_the_device_is_there_after_the_launch() -> None:
    def add_one(_kernel: Any, numbers: torch.Tensor, amount: int, *, grid: Any) -> None:
        assert grid == (1,)
        numbers += amount

    numbers = torch.zeros(4)
    mirrored(add_one, CPU)(None, numbers[1:3], 5, grid=(1,))
    assert numbers.tolist() == [0, 5, 5, 0]


def test_views_that_share_memory_share_it_on_the_device_too() -> None:
    cache = torch.arange(12.0).view(3, 4)
    mirror = DeviceMirror(CPU)
    keys, values = mirror.there(cache[:, :2]), mirror.there(cache.T)
    assert keys.data_ptr() != cache.data_ptr()
    assert values.stride() == cache.T.stride()
    keys[0, 1] = 99
    assert values[1, 0] == 99
    assert cache[0, 1] == 1, "not before the launch is over"
    mirror.bring_back()
    assert cache[0, 1] == 99


def test_numbers_and_other_arguments_go_as_they_are() -> None:
    assert DeviceMirror(CPU).there(7) == 7
    assert DeviceMirror(CPU).there(None) is None
