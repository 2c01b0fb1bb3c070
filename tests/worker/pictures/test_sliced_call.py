"""Calls that are carried out in slices."""

import gc
import weakref
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from scheduler.input_messages import EncoderInput
from scheduler.messages import SchedulerOutput
from tests.fakes import make_sequence
from tests.world import World, small_config
from worker.pictures import sliced_call
from worker.pictures.sliced_call import SlicedCall
from worker.pictures.tower_parts import TowerParts, _attend, cut_tower
from worker.steps.pictures import Pictures


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


def test_a_slice_ends_with_the_part_that_is_not_done_in_it(monkeypatch) -> None:
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
    assert ends_s == [3.0]


@pytest.mark.parametrize("part_s", [0.004, 0.025], ids=["shorter than a slice", "longer"])
def test_encoding_takes_a_fifth_of_the_steps_beside_it_in_the_mean(
    monkeypatch: pytest.MonkeyPatch, part_s: float
) -> None:
    clock_s, taken_s, steps_s, random = 0.0, list[float](), list[float](), Random(3)
    monkeypatch.setattr(sliced_call, "monotonic", lambda: clock_s)

    def call() -> None:
        nonlocal clock_s
        while True:
            sliced.pause()
            clock_s += part_s * random.uniform(0.6, 1.4)

    def takes_s(slice_s: float) -> float:
        begun_s = clock_s
        if slice_s:
            sliced.go_on(slice_s)
        taken_s.append(clock_s - begun_s)
        steps_s.append(world.scheduler._state.step_time.base_s)  # of steps that are all alike
        return taken_s[-1]

    sliced: SlicedCall[None] = SlicedCall(call)
    world = World(small_config(num_blocks=99, max_model_len=300, encoder_cache_tokens=4, target_itl_s=0.5))
    world.worker.encodes_every, world.worker.takes_s = 10**6, takes_s
    world.add(make_sequence(1, [1, 2, 3], max_tokens=250))
    for _ in range(12):
        world.step()
    taken_s.clear()
    steps_s.clear()
    world.add(make_sequence(2, [5] * 9, encoder_inputs=(EncoderInput(0, 4, "a cat"),), max_tokens=1))
    for _ in range(200):
        world.step()
    sliced.abandon()
    assert sum(taken_s) == pytest.approx(0.2 * sum(steps_s), rel=0.02)
    assert all(taken < 0.2 * step_s + 1.4 * part_s for taken, step_s in zip(taken_s, steps_s, strict=True))


def test_a_plan_without_a_slice_waits_for_no_device() -> None:
    eyes: Any = SimpleNamespace(device=None)
    assert Pictures(eyes, 4).encode(SchedulerOutput(1, (), (), {}, (), 0), {}).offsets == {}


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
