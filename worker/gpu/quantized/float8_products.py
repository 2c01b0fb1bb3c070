"""Products in which both sides are floats of 8 bits, which --activations fp8 asks for.

Owns: the choice between torch's scaled product and, for few rows, the kernel of codes; both have the same
factors. The first has no tiles of fewer than 64 rows.
Never: takes weights with several scales for an output: their rows stay as they are.

Shapes: T tokens, N outputs, K inputs.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from worker.gpu.quantized.kernels.row_kernels import round_rows, round_rows_as_numbers
from worker.gpu.quantized.products import CodeProduct, grouped
from worker.model.linear import Linear
from worker.quantized.grouped_weight import FLOAT8, GroupedWeight

MOST_FEW_ROWS = 16
"""Rows up to which codes are multiplied where no trial says more."""
_MULTIPLE = 16
"""Sizes that torch's product takes are multiples of it."""


FLOAT8_ROWS = "float8 times float8"
"""See Weight.format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8RowsWeight(GroupedWeight):
    """A weight whose input rows are to be rounded as it is."""

    @property
    def format(self) -> str:
        return FLOAT8_ROWS


def with_float8_rows(linear: Linear) -> Linear:
    """Let the input rows of a layer be rounded, if both sides of its product can be floats of 8 bits."""
    codes = linear.weight
    if not isinstance(codes, GroupedWeight) or not has_float8_product(codes):
        return linear
    parts = {field.name: getattr(codes, field.name) for field in fields(codes)}
    return replace(linear, weight=Float8RowsWeight(**parts))


def has_float8_product(weight: GroupedWeight) -> bool:
    """Tell whether rows can be rounded too: a scale must be of all inputs of an output."""
    is_even = weight.num_inputs % _MULTIPLE == 0 and weight.num_outputs % _MULTIPLE == 0
    is_plain = weight.offsets_NG is None and weight.permutation_K is None
    return weight.format == FLOAT8 and is_plain and is_even and weight.scales_NG.shape[1] == 1


class Float8Product:
    """The product of a linear layer. See Product (gpu/products.py)."""

    def __init__(self, linear: Linear) -> None:
        codes = grouped(linear.weight)
        self._few_rows = CodeProduct(Linear.of(codes, linear.bias_N), in_rows=True)
        codes_NK, self._range = self._few_rows.float8_words
        self._codes_KN = codes_NK.t()
        self._scales_1N = codes.scales_NG.view(1, -1).contiguous()
        self._bias_N = linear.bias_N
        self.num_outputs, self.num_inputs = linear.num_outputs, linear.num_inputs
        self.most_few_rows = MOST_FEW_ROWS

    def describe(self) -> str:
        """Name sizes and format for a person; products that are named alike take about the same time."""
        return f"{self.num_outputs} x {self.num_inputs} in {FLOAT8_ROWS}"

    @property
    def memory(self) -> Tensor:
        """Return the codes, which each product reads."""
        return self._few_rows.memory

    @property
    def has_bias(self) -> bool:
        return self._bias_N is not None

    def multiply(self, x_TK: Tensor) -> Tensor:
        """Return [T, N], with the bias."""
        return self.multiply_few(x_TK) if len(x_TK) <= self.most_few_rows else self.multiply_many(x_TK)

    def multiply_few(self, x_TK: Tensor) -> Tensor:
        """Return [T, N] by the kernel of codes."""
        return self._few_rows.multiply_scaled(*round_rows_as_numbers(x_TK))

    def multiply_many(self, x_TK: Tensor) -> Tensor:
        """Return [T, N] by torch's scaled product."""
        rounded_TK, scales_T1 = round_rows(x_TK, in_ranges_of=self._range)
        out_TN = torch._scaled_mm(
            rounded_TK,
            self._codes_KN,
            scale_a=scales_T1,
            scale_b=self._scales_1N,
            out_dtype=torch.bfloat16,
        ).to(x_TK.dtype)
        return out_TN if self._bias_N is None else out_TN.add_(self._bias_N)

    def multiply_and_add(self, residual_TN: Tensor, x_TK: Tensor, multiplier: float) -> None:
        """Add the product, times `multiplier`, to the residual in place."""
        if len(x_TK) <= self.most_few_rows and self._bias_N is None:
            rounded_TK, scales_T1 = round_rows_as_numbers(x_TK)
            self._few_rows.multiply_scaled_and_add(residual_TN, rounded_TK, scales_T1, multiplier)
        else:
            residual_TN.add_(self.multiply(x_TK), alpha=multiplier)
