"""Calls that are carried out in slices."""

import gc
import weakref

import pytest

from worker.pictures.sliced_call import SlicedCall


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
