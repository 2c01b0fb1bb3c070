"""The product of a linear layer, whatever numbers its weight is in: one seam for formats, shards and devices.

Owns: the form of a weight that the rest of the worker relies on, the merging, reordering and cutting of
linear layers, and their product in plain torch, which is the reference.
Source: column and row parallel layers, arXiv:1909.08053.

A new format of weights is a Weight, which each device that has a kernel for it names among those it takes.

Shapes: T tokens, N outputs, K inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional


class Weight(Protocol):
    """Numbers [N, K] in some format. Never changed: each method returns another weight."""

    @property
    def format(self) -> str:
        """Number format, such as "bfloat16". Weights of one format can be merged, and share kernels."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_bytes(self) -> int: ...

    def outputs(self, indices_N: Tensor) -> Self:
        """Take these outputs, in this order."""

    def inputs(self, start: int, end: int) -> Self:
        """Take a range of inputs. Raises ValueError where the format cannot be cut."""

    def merge(self, others: Sequence[Self]) -> Self:
        """Append the outputs of others of the same format. Raises ValueError where they cannot be."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers [N, K] in a plain dtype; without a copy where they are in it."""


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A tensor of floats. See Weight."""

    numbers_NK: Tensor

    @property
    def format(self) -> str:
        return str(self.numbers_NK.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_inputs = self.numbers_NK.shape
        return num_outputs, num_inputs

    @property
    def device(self) -> torch.device:
        return self.numbers_NK.device

    @property
    def num_bytes(self) -> int:
        return self.numbers_NK.nbytes

    def outputs(self, indices_N: Tensor) -> "PlainWeight":
        return PlainWeight(self.numbers_NK[indices_N])

    def inputs(self, start: int, end: int) -> "PlainWeight":
        return PlainWeight(self.numbers_NK[:, start:end].contiguous())

    def merge(self, others: Sequence["PlainWeight"]) -> "PlainWeight":
        return PlainWeight(torch.cat([self.numbers_NK, *(each.numbers_NK for each in others)]))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.numbers_NK.to(dtype)


CUT = "cut"
"""Name of the Cut, at a module that is a rank's part of a product."""


class Axis(Enum):
    """The side of a linear layer that is divided among ranks."""

    OUTPUTS = "each rank computes some outputs, and all of their sums"
    INPUTS = "each rank has some inputs; the sum over all ranks is the product"


class Segment(NamedTuple):
    """Consecutive outputs that were a layer of their own, or are divided alike."""

    num_outputs: int
    unit: int = 1
    """Outputs that stay on one rank, such as those of a head."""


class Cut(NamedTuple):
    """The part of a linear layer that one rank computes."""

    segments: tuple[Segment, ...]
    """Segments of the whole layer."""
    outputs_N: Tensor
    """Outputs of the whole layer that are computed, in their order."""
    inputs: slice


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer, or several that share their input, with their outputs side by side."""

    weight: Weight
    bias_N: Tensor | None
    segments: tuple[Segment, ...]
    """They cover all outputs, in their order."""

    @classmethod
    def of(cls, weight: Weight, bias_N: Tensor | None = None) -> "Linear":
        """Make a layer of one segment."""
        return cls(weight, bias_N, (Segment(weight.shape[0]),))

    def __post_init__(self) -> None:
        if sum(segment.num_outputs for segment in self.segments) != self.num_outputs:
            raise ValueError(f"segments {self.segments} of {self.num_outputs} outputs")

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def has_bias(self) -> bool:
        return self.bias_N is not None

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + (0 if self.bias_N is None else self.bias_N.nbytes)

    def describe(self) -> str:
        """Name the outputs, the inputs and the numbers, for a person."""
        return f"{self.num_outputs} x {self.num_inputs} {self.weight.format}, {self.num_bytes} bytes"

    def multiply(self, x_TK: Tensor) -> Tensor:
        """Return [T, N]."""
        return functional.linear(x_TK, self.weight.dequantized(x_TK.dtype), self.bias_N)

    def multiply_and_add(self, residual_TN: Tensor, x_TK: Tensor, multiplier: float) -> None:
        """Add the product, times `multiplier`, to the residual in place."""
        if self.bias_N is not None:
            residual_TN.add_(self.multiply(x_TK), alpha=multiplier)
        else:
            residual_TN.addmm_(x_TK, self.weight.dequantized(x_TK.dtype).t(), alpha=multiplier)

    def dequantized(self, dtype: torch.dtype) -> "Linear":
        """Return the same layer in plain numbers."""
        bias_N = None if self.bias_N is None else self.bias_N.to(dtype)
        return Linear(PlainWeight(self.weight.dequantized(dtype)), bias_N, self.segments)

    def in_segments(self, segments: Sequence[Segment]) -> "Linear":
        """Say how the outputs are made up, where their module did not show it."""
        return replace(self, segments=tuple(segments))

    def reordered(self, order_N: Tensor) -> "Linear":
        """Permute the outputs, each within its segment."""
        return self._taken(order_N, self.segments)

    def whole(self) -> Cut:
        """Return the cut that takes everything."""
        return Cut(self.segments, torch.arange(self.num_outputs), slice(0, self.num_inputs))

    def cut(self, rank: int, world: int, axis: Axis) -> Cut:
        """Say what one rank of `world` computes. Raises ValueError where that is no whole number of units.

        Of outputs, each segment is divided by itself, so that each rank has a part of queries, of keys and of
        values. A segment of fewer units than ranks is repeated: some ranks share one.
        """
        if axis is Axis.INPUTS:
            if self.num_inputs % world:
                raise ValueError(f"{self.num_inputs} inputs cannot be divided by {world}")
            size = self.num_inputs // world
            return self.whole()._replace(inputs=slice(rank * size, (rank + 1) * size))
        ranges, start = [], 0
        for segment in self.segments:
            first, last = _part_of(segment, rank, world)
            ranges.append(torch.arange(start + first, start + last))
            start += segment.num_outputs
        return self.whole()._replace(outputs_N=torch.cat(ranges))

    def shard(self, rank: int, world: int, axis: Axis) -> "Linear":
        """Cut what one rank of `world` computes; see `cut`.

        Of inputs, the bias stays with rank 0, since it must be added once.
        """
        cut = self.cut(rank, world, axis)
        if axis is Axis.INPUTS:
            weight = self.weight.inputs(cut.inputs.start, cut.inputs.stop)
            return Linear(weight, self.bias_N if rank == 0 else None, self.segments)
        sizes = []
        for segment in self.segments:
            first, last = _part_of(segment, rank, world)
            sizes.append(segment._replace(num_outputs=last - first))
        return self._taken(cut.outputs_N.to(self.weight.device), tuple(sizes))

    def _taken(self, indices_N: Tensor, segments: tuple[Segment, ...]) -> "Linear":
        bias_N = None if self.bias_N is None else self.bias_N[indices_N]
        return Linear(self.weight.outputs(indices_N), bias_N, segments)


def _part_of(segment: Segment, rank: int, world: int) -> tuple[int, int]:
    """Find the outputs of a rank within its segment."""
    num_units, rest = divmod(segment.num_outputs, segment.unit)
    if not rest and num_units % world == 0:
        size = segment.num_outputs // world
        return rank * size, (rank + 1) * size
    if not rest and num_units and world % num_units == 0:
        unit = rank * num_units // world
        return unit * segment.unit, (unit + 1) * segment.unit
    raise ValueError(f"{segment.num_outputs} outputs in units of {segment.unit} cannot be divided by {world}")


def merge(linears: Sequence[Linear]) -> Linear:
    """Put layers of one input and one format side by side, in the order given."""
    first, *others = linears
    if not others:
        return first
    weight = first.weight.merge([each.weight for each in others])
    segments = tuple(segment for each in linears for segment in each.segments)
    biases = [each.bias_N for each in linears]
    some = next((bias_N for bias_N in biases if bias_N is not None), None)
    if some is None:
        return Linear(weight, None, segments)
    bias_N = torch.cat(
        [some.new_zeros(each.num_outputs) if each.bias_N is None else each.bias_N for each in linears]
    )
    return Linear(weight, bias_N, segments)


def linear_of(module: Any) -> Linear | None:
    """Return the linear layer that a module computes; None where it is no such module.

    A subclass of nn.Linear may do more than its base, and counts only if it has `as_linear`.
    """
    if type(module) is nn.Linear:
        bias_N = None if module.bias is None else module.bias.detach()
        return Linear.of(PlainWeight(module.weight.detach()), bias_N)
    read = getattr(module, "as_linear", None)
    if read is None:
        return None
    found: Linear = read()
    return found
