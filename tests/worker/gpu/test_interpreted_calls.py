"""Calls of interpreted kernels that are repeated by recipe give what the interpreter's rules give."""

import pytest
import torch
import triton
from triton import language as tl

from tests.worker.gpu.interpreted_gpu import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="they are the interpreter's")
SIZE = 4


@triton.jit
def _square_and_multiply(x, y, out, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    left, right = tl.load(x + places), tl.load(y + places)
    tl.store(out + places, left * left)
    tl.store(out + SIZE + places, left * right)
    tl.store(out + 2 * SIZE + places, right * left)


def test_a_recipe_learnt_of_equal_arguments_holds_for_others() -> None:
    x, y, out = torch.arange(4.0), torch.arange(4.0) + 5, torch.zeros(12)
    for _ in range(2):
        _square_and_multiply[(1,)](x, y, out, SIZE)
        assert torch.equal(out.view(3, SIZE), torch.stack([x * x, x * y, y * x]))
        x, y = y, x


@triton.jit
def _add_constants(x, out, ZERO: tl.constexpr, NUMBER: tl.constexpr):
    tl.store(out, tl.load(x) * ZERO)
    tl.store(out + 1, tl.load(x) + NUMBER)


@pytest.mark.parametrize("number", [1, 2, 1.5])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_numbers_of_python_are_arguments_of_their_own(zero: float, number: float) -> None:
    x, out = torch.ones(1), torch.zeros(2)
    _add_constants[(1,)](x, out, zero, number)
    assert out.tolist() == [0, 1 + number]
    assert torch.signbit(out[0]) == (str(zero) == "-0.0")


@triton.jit
def _load_if(x, is_there, otherwise, out):
    tl.store(out, tl.load(x, mask=tl.load(is_there) != 0, other=tl.load(otherwise)))


@pytest.mark.parametrize("order", [(0, 7, 0), (7, 0, 7)])
def test_what_depends_on_a_number_in_a_tensor_is_no_recipe(order: tuple[int, ...]) -> None:
    """The interpreter asks whether a scalar is true to find out whether it is there."""
    for otherwise in order:
        for is_there in (0, 1):
            out = torch.zeros(1, dtype=torch.int32)
            numbers = [torch.tensor([each], dtype=torch.int32) for each in (3, is_there, otherwise)]
            _load_if[(1,)](*numbers, out)
            assert out.item() == (3 if is_there else otherwise)
