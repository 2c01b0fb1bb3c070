"""Products by codes, with few rows and with so many that every tile fills.

Owns: small weights of random codes, and what their dequantized numbers make of a row.

Shapes: T tokens, N outputs, K inputs.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from campaigns.gpu.first.trial import Build, Place, Trial, agreement
from campaigns.gpu.tune.random_codes import KINDS, random_codes
from worker.gpu_quantized.code_products import CodeProduct
from worker.gpu_quantized.float8_products import Float8Product
from worker.gpu_quantized.kernels.row_kernels import round_rows
from worker.model.linear import Linear

_NUM_OUTPUTS, _NUM_INPUTS = 144, 512
_NUM_ROWS = (1, 12, 20, 50, 140)
"""One for each choice of tiles (worker/gpu_quantized/code_products.py)."""


def code_trials(place: Place) -> list[Build]:
    trials: list[Build] = [partial(_product, place, kind, count) for kind in KINDS for count in _NUM_ROWS]
    trials += [partial(_numbers, place, kind) for kind in KINDS]
    if place.dtype is torch.float32:  # it has no product by float8 in torch
        return trials
    return [*trials, *(partial(_float8_rows, place, count) for count in (3, 40))]


def _product(place: Place, kind: str, count: int) -> Trial:
    weight = random_codes(kind, _NUM_OUTPUTS, _NUM_INPUTS, place.device)
    x_TK, before_TN = place.random(count, _NUM_INPUTS), place.random(count, _NUM_OUTPUTS)
    product = CodeProduct(Linear.of(weight))

    def compute() -> list[Tensor]:
        added_TN = before_TN.clone()
        product.multiply_and_add(added_TN, x_TK, 0.5)
        return [product.multiply_to(x_TK, torch.float32), added_TN]

    def define() -> list[Tensor]:
        sums_TN = x_TK.double() @ weight.dequantized().double().T
        return [sums_TN, before_TN.double() + 0.5 * sums_TN]

    inputs = {"rows": x_TK, "codes": weight.codes, "scales": weight.scales_NG}
    return agreement(f"codes: {kind}", inputs, compute, define)(place.tolerance)


def _numbers(place: Place, kind: str) -> Trial:
    """Write numbers, and multiply by them as by those of a plain weight."""
    weight = random_codes(kind, _NUM_OUTPUTS, _NUM_INPUTS, place.device)
    x_TK, product = place.random(_NUM_ROWS[-1], _NUM_INPUTS), CodeProduct(Linear.of(weight))

    def compute() -> list[Tensor]:
        return [product.numbers(place.dtype), product.multiply_by_numbers(x_TK)]

    def define() -> list[Tensor]:
        numbers_NK = weight.dequantized(place.dtype)
        return [numbers_NK, x_TK.double() @ numbers_NK.double().T]

    inputs = {"rows": x_TK, "codes": weight.codes}
    return agreement(f"codes written: {kind}", inputs, compute, define)(place.tolerance)


def _float8_rows(place: Place, count: int) -> Trial:
    """Multiply rows that are rounded, as the weights are, by the product of torch where they are many."""
    whole = random_codes("float8", _NUM_OUTPUTS, _NUM_INPUTS, place.device)
    weight = replace(whole, scales_NG=whole.scales_NG[:, :1].contiguous())
    x_TK = place.random(count, _NUM_INPUTS)

    def define() -> list[Tensor]:
        rounded_TK, scales_T1 = round_rows(x_TK)
        return [(rounded_TK.double() * scales_T1) @ weight.dequantized().double().T]

    inputs = {"rows": x_TK, "codes": weight.codes}
    compute = Float8Product(Linear.of(weight))
    return agreement("float8 by float8", inputs, lambda: [compute.multiply(x_TK)], define)(place.tolerance)
