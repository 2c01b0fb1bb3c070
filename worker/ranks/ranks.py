"""Ranks of a model: the interface, and a model that one process computes alone.

Owns: the operations that ranks carry out together. Each rank calls the same ones in the same order, which
follows from the plans alone.
Source: tensor parallelism, arXiv:1909.08053.

Shapes: T tokens, P numbers of one rank.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker.ranks.stage import ONLY_STAGE, Stage


class Reducer(NamedTuple):
    """A C function that replaces sums by those over all ranks: void (void* context, float* sums, int64_t)."""

    function: int
    """Its address."""
    context: int | None


class ExchangeTimes(NamedTuple):
    """Seconds that a rank has spent within its exchanges since it joined."""

    exchange_s: float = 0.0
    """Time of copying and adding."""
    wait_s: float = 0.0
    """Time of waiting for a later rank."""


class World(Protocol):
    """All ranks of all stages, as one of them sees them."""

    rank: int

    def join(self, library: Path | None) -> None:
        """Open the exchange; that of CPUs is by functions of the compiled kernels."""

    def of_all(self, numbers: list[int]) -> Tensor:
        """Return the numbers of each rank, int64 [ranks, numbers]; each brings as many."""


class Ranks(World, Protocol):
    """The ranks of one stage of a model, as one of them sees them."""

    size: int
    stage: Stage
    """The layers that they have."""

    @property
    def reducer(self) -> Reducer:
        """The sum within a step."""

    def reduce(self, sums: Tensor) -> None:
        """Replace sums by those over all ranks, in place; each rank gets the same bits.

        They are float32 on CPUs, and on GPUs numbers of any dtype.
        """

    def gather(self, part_TP: Tensor) -> Tensor:
        """Put the parts of all ranks side by side, [T, size * P], on each of them."""

    def share(self, numbers: Tensor) -> None:
        """Replace numbers by those of rank 0, in place."""

    def broadcast(self, numbers: list[int]) -> list[int]:
        """Return the numbers of rank 0; each rank brings as many."""

    def agree_min(self, number: int) -> int:
        """Return the smallest number of all ranks, of all stages."""

    def all_have(self, text: str) -> bool:
        """Tell whether all ranks, of all stages, bring the same text."""

    def times(self) -> ExchangeTimes:
        """Return the times so far, of the exchanges of this stage."""

    def check_same(self, what: str, text: str) -> None:
        """Raise StartupError if `text`, which describes `what`, is another one on some rank of any stage."""


class Alone:
    """A model that is not divided: see Ranks."""

    rank, size, stage = 0, 1, ONLY_STAGE

    def join(self, library: Path | None) -> None:
        """Do nothing."""

    @property
    def reducer(self) -> Reducer:
        raise NotImplementedError("one process has nothing to sum")

    def reduce(self, sums: Tensor) -> None:
        """Do nothing: the sums are whole."""

    def gather(self, part_TP: Tensor) -> Tensor:
        return part_TP

    def share(self, numbers: Tensor) -> None:
        """Do nothing: they are rank 0's."""

    def of_all(self, numbers: list[int]) -> Tensor:
        return torch.tensor([numbers], dtype=torch.int64)

    def broadcast(self, numbers: list[int]) -> list[int]:
        return numbers

    def agree_min(self, number: int) -> int:
        return number

    def all_have(self, text: str) -> bool:  # noqa: ARG002 - there is no other
        return True

    def times(self) -> ExchangeTimes:
        return ExchangeTimes()

    def check_same(self, what: str, text: str) -> None:
        """Do nothing."""


ALONE = Alone()


def is_divided(ranks: Ranks) -> bool:
    """Tell whether other processes compute a part of the model."""
    return ranks.size > 1 or ranks.stage.count > 1


def number_of(ranks: Ranks) -> int:
    """Number a rank among those of all stages."""
    return ranks.stage.index * ranks.size + ranks.rank


def samples(ranks: Ranks) -> bool:
    """Tell whether a rank has the logits, and samples for all others."""
    return ranks.rank == 0 and ranks.stage.is_last
