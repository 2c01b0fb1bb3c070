"""One thing that is tried, and how what is found is compared with what is defined.

Owns: the words for inputs, and the measure by which two tensors agree.
Never: what is tried (the modules of trials).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Disagreement(Exception):
    """Error of a result that differs from its definition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Something small that works or does not."""

    name: str
    inputs: str
    """Shapes and dtypes, for the reader."""
    work: Callable[[], str]
    """Returns a remark of a few words. Raises whatever is wrong."""


Build = Callable[[], Trial]
"""Makes the inputs, and may fail at that."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place where trials run, and their format."""

    device: torch.device
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """Relative, and absolute for numbers below 1."""
        return {torch.float32: 1e-4, torch.bfloat16: 3e-2}[self.dtype]

    def random(self, *size: int, scale: float = 1.0) -> Tensor:
        """The same numbers wherever they are needed: they are made on the CPU."""
        generator = torch.Generator().manual_seed(sum(size))
        return (torch.randn(size, generator=generator) * scale).to(self.dtype).to(self.device)

    def integers(self, values: Sequence[Any] | Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self.device)


Tensors = Sequence[Tensor]


def agreement(
    name: str, inputs: dict[str, Tensor], compute: Callable[[], Tensors], define: Callable[[], Tensors]
) -> Callable[[float], Trial]:
    """A trial, given its tolerance: that both give the same tensors. `compute` is called first."""

    def with_tolerance(tolerance: float) -> Trial:
        def work() -> str:
            found = [each.detach().cpu().double() for each in compute()]
            expected = [each.detach().cpu().double() for each in define()]
            pairs = zip(found, expected, strict=True)
            return f"differs by {max(_compare(*pair, tolerance) for pair in pairs):.1e}"

        return Trial(name=name, inputs=describe(inputs), work=work)

    return with_tolerance


def describe(inputs: dict[str, Tensor]) -> str:
    return ", ".join(
        f"{name} {'x'.join(map(str, each.shape)) or 'number'} {str(each.dtype).removeprefix('torch.')}"
        for name, each in inputs.items()
    )


def _compare(found: Tensor, expected: Tensor, tolerance: float) -> float:
    """The largest difference, relative to numbers above 1. Raises Disagreement."""
    if found.shape != expected.shape:
        raise Disagreement(f"shape {list(found.shape)} instead of {list(expected.shape)}")
    if not found.numel():
        return 0.0
    equal = (found == expected) | (found.isnan() & expected.isnan())
    differences = ((found - expected).abs() / expected.abs().clamp(min=1.0)).masked_fill(equal, 0.0)
    differences = differences.nan_to_num(nan=torch.inf, posinf=torch.inf)
    worst = int(differences.argmax())
    largest = float(differences.flatten()[worst])
    if largest > tolerance:
        num_wrong = int((differences > tolerance).sum())
        where = [int(each) for each in torch.unravel_index(torch.tensor(worst), found.shape)]
        raise Disagreement(
            f"{num_wrong} of {found.numel()} numbers differ; at {where} {float(found.flatten()[worst]):.4g} "
            f"instead of {float(expected.flatten()[worst]):.4g}"
        )
    return largest
