"""The largest step, by the memory of the GPU where the operator leaves it open."""

import pytest

from engine import step_limits as module
from engine.step_limits import step_limits

GIB = 1 << 30


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_torch_has_cuda", lambda: True)


@pytest.mark.parametrize(
    ("gpu_gib", "expected"), [(0, (256, 2048)), (24, (256, 2048)), (79, (1024, 8192)), (139, (1024, 8192))]
)
def test_a_large_gpu_takes_larger_steps(gpu_gib: int, expected: tuple[int, int]) -> None:
    assert step_limits("auto", None, None, gpu_gib * GIB) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("cpu", None, None), (256, 2048)),
        (("cuda:1", 100, None), (100, 8192)),
        (("auto", 10_000, None), (10_000, 10_000)),
        (("auto", None, 512), (512, 512)),
        (("auto", 64, 63), (64, 63)),
    ],
)
def test_what_the_operator_asks_for_is_taken_and_the_other_agrees(asked, expected) -> None:
    """The last contradict one another, which is refused."""
    assert step_limits(*asked, 139 * GIB) == expected


def test_a_torch_without_cuda_takes_the_steps_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_torch_has_cuda", lambda: False)
    assert step_limits("auto", None, None, 139 * GIB) == (256, 2048)
