"""The largest step, by the memory of the GPU where the operator leaves it open."""

import pytest

from engine.options import engine_config
from engine.options.engine_config import step_limits
from engine.options.options import Options

GIB = 1 << 30


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_config, "_torch_has_cuda", lambda: True)


@pytest.mark.parametrize(
    ("gpu_gib", "expected"), [(0, (256, 2048)), (24, (256, 2048)), (79, (1024, 8192)), (139, (1024, 8192))]
)
def test_a_large_gpu_takes_larger_steps(gpu_gib: int, expected: tuple[int, int]) -> None:
    assert step_limits(Options(), gpu_gib * GIB) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"device": "cpu"}, (256, 2048)),
        ({"max_num_seqs": 100}, (100, 8192)),
        ({"max_num_seqs": 10_000}, (10_000, 10_000)),
        ({"max_num_batched_tokens": 512}, (512, 512)),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, (64, 63)),
    ],
)
def test_what_the_operator_asks_for_is_taken_and_the_other_agrees(asked, expected) -> None:
    """The last contradict one another, which is refused."""
    assert step_limits(Options(**asked), 139 * GIB) == expected


def test_a_torch_without_cuda_takes_the_steps_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_config, "_torch_has_cuda", lambda: False)
    assert step_limits(Options(), 139 * GIB) == (256, 2048)
