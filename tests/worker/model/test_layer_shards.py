"""Parts of a layer that stays: which MLPs can be divided among ranks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from worker.model.layer_parts import Unrecognised
from worker.model.layer_shards import shard_own_mlp
from worker.model.linear import Axis, Linear
from worker.ranks.ranks import Alone

HIDDEN, GATES = 16, 32


class Rank(Alone):
    """One of two ranks, whose sums the test adds up."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Product(nn.Module):
    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._linear.multiply(x)


class Mlp(nn.Module):
    """An MLP with some function between its products."""

    def __init__(self, between: Callable[[Tensor], Tensor], *, num_parts: int) -> None:
        super().__init__()
        name = "up_proj" if num_parts == 1 else "gate_up_proj"
        self.add_module(name, nn.Linear(HIDDEN, num_parts * GATES, bias=False))
        self.down_proj = nn.Linear(GATES, HIDDEN)
        self._before, self._between = name, between

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._between(self.get_submodule(self._before)(x)))


def halves(x: Tensor) -> Tensor:
    gates, ups = x.chunk(2, dim=-1)
    return gates.clamp(max=1.0) * ups


def neighbours(x: Tensor) -> Tensor:
    return x[..., ::2] * x[..., 1::2]


def above_mean(x: Tensor) -> Tensor:
    return torch.relu(x - x.mean(dim=-1, keepdim=True))


def sum_of_ranks(make: Callable[[], Mlp], x: Tensor) -> Tensor:
    total = torch.zeros(len(x), HIDDEN)
    for rank in range(2):
        torch.manual_seed(1)
        mlp = make().requires_grad_(False)

        def pack(linear: Linear, axis: Axis) -> Product:
            assert (linear.num_inputs if axis is Axis.INPUTS else linear.num_outputs) % (GATES // 2) == 0
            return Product(linear)

        shard_own_mlp(mlp, Rank(rank), pack)
        total += mlp(x)
    return total


@pytest.mark.parametrize(("between", "num_parts"), [(torch.relu, 1), (halves, 2)])
def test_parts_of_an_mlp_add_up_to_the_whole(between: Callable[[Tensor], Tensor], num_parts: int) -> None:
    x = torch.randn(5, HIDDEN)
    torch.manual_seed(1)
    whole = Mlp(between, num_parts=num_parts)
    found = sum_of_ranks(lambda: Mlp(between, num_parts=num_parts), x)
    torch.testing.assert_close(found, whole(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("between", "num_parts"),
    [(neighbours, 2), (above_mean, 1), (nn.LayerNorm(GATES), 1), (lambda x: x.softmax(dim=-1), 1)],
    ids=["neighbours", "a threshold", "a norm", "a softmax"],
)
def test_an_mlp_that_takes_its_gates_together_is_not_divided(
    between: Callable[[Tensor], Tensor], num_parts: int
) -> None:
    with pytest.raises(Unrecognised, match="its MLP cannot be divided among ranks"):
        sum_of_ranks(lambda: Mlp(between, num_parts=num_parts), torch.randn(5, HIDDEN))
