"""Calls that are carried out in slices."""

import gc
import weakref

import pytest
import torch
from torch import nn

from worker.pictures import sliced_call
from worker.pictures.sliced_call import SlicedCall
from worker.pictures.tower_parts import TowerParts, _attend, cut_tower


class _Large:
    """Stands for a tensor."""


def test_a_call_that_failed_keeps_nothing_of_what_it_had_made() -> None:
    made = []

    def call() -> None:
        large = _Large()
        made.append(weakref.ref(large))
        raise MemoryError

    gc.disable()
    try:
        failing: SlicedCall[None] = SlicedCall(call)
        with pytest.raises(MemoryError) as caught:
            failing.go_on(1.0)
        failing._thread.join()
        del failing, caught
        assert made[0]() is None
    finally:
        gc.enable()


def test_a_slice_ends_before_a_part_that_would_not_be_done_in_it(monkeypatch) -> None:
    now_s, ends_s = 0.0, []
    monkeypatch.setattr(sliced_call, "monotonic", lambda: now_s)

    def call() -> str:
        nonlocal now_s
        for _ in range(5):
            now_s += 1.0
            sliced.pause()
        return "done"

    sliced: SlicedCall[str] = SlicedCall(call)
    while sliced.go_on(2.5) is None:
        ends_s.append(now_s)
    assert ends_s == [2.0, 4.0]


def test_parts_of_a_tower_are_as_large_as_their_work_and_as_the_model_allows() -> None:
    num_pauses = 0

    def pause() -> None:
        nonlocal num_pauses
        num_pauses += 1

    for module, most, expected in (
        (nn.Linear(64, 64), 2**40, 2),
        (nn.Linear(4096, 4096), 2**40, 8),
        (nn.Linear(64, 64), 2**18, 8),
        (nn.Linear(64, 64), 1, 32),
        (nn.GELU(), 2**40, 2),
        (nn.Softmax(dim=0), 2**40, 1),
    ):
        tower, num_pauses = nn.Sequential(module), 0
        x = torch.randn(512, getattr(module, "in_features", 64))
        with torch.inference_mode():
            wanted = module(x)
            cut_tower(tower, TowerParts(pause, most))
            torch.testing.assert_close(tower(x), wanted)
        assert num_pauses == expected


def test_parts_of_the_attention_of_several_tiles_have_fewer_rows() -> None:
    pauses: list[int] = []
    attention = nn.Identity()
    cut_tower(nn.Sequential(attention), TowerParts(lambda: pauses.append(0), 4 * 512 * 64 * 256))
    for num_tiles, num_parts in ((1, 2), (4, 8)):
        query, key, value = torch.randn(3, num_tiles, 1, 512, 64)
        pauses.clear()
        found, _ = _attend(attention, query, key, value, None)
        assert len(pauses) == num_parts
        torch.testing.assert_close(found[:, :, 0], (query @ key.mT / 8).softmax(-1)[:, 0] @ value[:, 0])
