"""Linear layers in the form in which a GPU multiplies by them.

Owns: the interface of a product, and the table of formats that have one.

Shapes: T tokens, N outputs, K inputs.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from worker.gpu.quantized.float8_products import FLOAT8_ROWS, Float8Product, with_float8_rows
from worker.gpu.quantized.products import CodeProduct, find_hindrance
from worker.model.layer_parts import TakenWeights
from worker.model.linear import Linear
from worker.model.quantization import INT8, Quantization, Rounding
from worker.quantized.grouped_weight import EIGHT_BITS, FLOAT8, FOUR_BITS


class Product(Protocol):
    """The product of a linear layer. It must not wait for the device: a graph can capture it."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def has_bias(self) -> bool: ...

    def multiply(self, x_TK: Tensor) -> Tensor:
        """Return [T, N], with the bias."""

    def multiply_and_add(self, residual_TN: Tensor, x_TK: Tensor, multiplier: float) -> None:
        """Add the product, times `multiplier`, to the residual in place."""


def _by_cublas(linear: Linear) -> Product:
    """Multiply by torch, which calls cuBLAS; it adds to the residual as it writes the sums."""
    return linear


_PRODUCTS: dict[str, Callable[[Linear], Product]] = {
    "float32": _by_cublas,
    "float16": _by_cublas,
    "bfloat16": _by_cublas,
    INT8: CodeProduct,
    FOUR_BITS: CodeProduct,
    EIGHT_BITS: CodeProduct,
    FLOAT8: CodeProduct,
    FLOAT8_ROWS: Float8Product,
}
TAKEN = TakenWeights(formats=frozenset(_PRODUCTS), size_multiple=1, find_hindrance=find_hindrance)


def round_weight(quantization: Quantization | None, linear: Linear) -> Linear:
    """Round a layer's weights; return it as it was where no product takes the rounded ones."""
    rounded = linear if quantization is None else quantization.quantize(linear)
    return rounded if TAKEN.include(rounded) else linear


def round_layer(rounding: Rounding, linear: Linear) -> Linear:
    """Round a fused layer's weights as the options ask, and let rows be rounded too if they do."""
    linear = round_weight(rounding.layers, linear)
    return linear if rounding.of_inputs is None else with_float8_rows(linear)


def product_of(linear: Linear) -> Product:
    """Bring a layer into the form that its format's kernels take."""
    return _PRODUCTS[linear.weight.format](linear)
