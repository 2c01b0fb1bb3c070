"""Proof that the GPU's kernels multiply by a model's quantized weights as their formats define it.

Shapes: T tokens, N outputs, K inputs.
"""

import torch
from torch import Tensor, nn

from worker.devices.trial import relative_error
from worker.gpu.quantized.float8_products import MOST_FEW_ROWS, Float8Product, has_float8_product
from worker.gpu.quantized.kernels.row_kernels import round_rows
from worker.gpu.quantized.products import CodeProduct, find_hindrance, grouped
from worker.model.linear import Linear, PlainWeight
from worker.model.quantization import Rounding
from worker.model.quantized_layers import find_kinds
from worker.quantized.grouped_weight import GroupedWeight
from worker.worker_errors import StartupError

NUM_TOKENS = (1, 12, 20, 50, 100)
"""Rows of the trials: one for each choice of tiles."""
_NUM_OUTPUTS, _EXAMPLE_INPUTS = 64, 256
_SEED = 13
_TOLERANCE = 1e-4
"""Error over size of the sums, which are float32 in another order."""
_ROUNDED_TOLERANCE, _ROUNDING_TOLERANCE = 5e-3, 5e-2
"""The same of sums that are rounded to bfloat16, and of rows that are rounded to 4 significant bits."""


def prove_products(model: nn.Module, rounding: Rounding, *, must_round_inputs: bool) -> None:
    """Try each kind of weight that has a product, and of those that options make. Raises StartupError.

    Its text names a module, or the option.
    """
    dtype = next(model.parameters()).dtype
    kinds = list(find_kinds(model).values())
    plain = Linear.of(PlainWeight(torch.randn(_NUM_OUTPUTS, _EXAMPLE_INPUTS).to(_device_of(model))))
    for option, chosen in (("--quantization", rounding.layers), ("--quantize-head", rounding.head)):
        if chosen is not None:
            kinds.append((f"{option} {chosen.word}", grouped(chosen.quantize(plain).weight)))
    for name, weight in kinds:
        if find_hindrance(weight) is None:
            prove_product(name, weight, dtype)
    if rounding.of_inputs is None:
        return
    taken = [weight for _, weight in kinds if has_float8_product(weight)]
    if must_round_inputs and not taken:
        raise StartupError(
            f"--activations {rounding.of_inputs.word} has no effect on weights that are not floats of 8 bits "
            "with one scale for each output",
            fix="leave it out, or add --quantization fp8",
        )
    for weight in taken:
        _prove_float8(weight.outputs(slice(_NUM_OUTPUTS)), dtype)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _prove_float8(weight: GroupedWeight, dtype: torch.dtype) -> None:
    """Try both ways to multiply rounded rows. Raises StartupError."""
    product = Float8Product(Linear.of(weight))
    for num_tokens in (1, 2 * MOST_FEW_ROWS):
        x_TK = _random_rows(num_tokens, weight).to(dtype)
        rounded_TK, scales_T1 = round_rows(x_TK)
        rows_TK = rounded_TK.double() * scales_T1
        expected_TN = rows_TK @ weight.dequantized().double().T
        rounding_error = relative_error(rows_TK, x_TK.double())
        try:
            found_TN = product.multiply(x_TK).double()
        except RuntimeError as error:
            raise StartupError(
                f"--activations fp8: this GPU has no such product: {error}", fix="leave --activations out"
            ) from error
        product_error = relative_error(found_TN, expected_TN)
        if product_error > _ROUNDED_TOLERANCE or rounding_error > _ROUNDING_TOLERANCE:
            raise StartupError(
                "products of float8 by float8 are not exact "
                f"(error {product_error:.1e}, rows {rounding_error:.1e})",
                fix="leave --activations out, and report it",
            )


def prove_product(name: str, weight: GroupedWeight, dtype: torch.dtype) -> None:
    """Try one weight. Raises StartupError with the name."""
    some = weight.outputs(slice(_NUM_OUTPUTS))
    numbers_NK = some.dequantized().double()
    product = CodeProduct(Linear.of(some))
    for num_tokens in NUM_TOKENS:
        x_TK = _random_rows(num_tokens, some).to(dtype)
        found_TN = product.multiply_to(x_TK, torch.float32).double()
        error = relative_error(found_TN, x_TK.double() @ numbers_NK.T)
        if error > _TOLERANCE:
            raise StartupError(
                f"the kernels do not multiply exactly by {name} ({weight.kind}, error {error:.1e})",
                fix="start with --gpu-kernels off, and report it",
            )
    # The same of the numbers that are written for many rows; in the dtype of the rows they are rounded once.
    error = relative_error(product.numbers(torch.float32).double(), numbers_NK)
    if error > _TOLERANCE:
        raise StartupError(
            f"the kernels do not write the numbers of {name} exactly ({weight.kind}, error {error:.1e})",
            fix="start with --gpu-kernels off, and report it",
        )


def _random_rows(num_tokens: int, weight: GroupedWeight) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn((num_tokens, weight.num_inputs), generator=generator).to(weight.device)
