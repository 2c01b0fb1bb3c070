"""Products by codes: which kernel, and which tiles of it, multiply how many rows.

Owns: three choices for each kind of product: tiles of which more share a processor; the number of rows from
which on cuBLAS multiplies numbers that were written for it; and how many rows of floats of 8 bits the kernel
of codes takes. A kernel that decodes does so once for each tile of rows; numbers are written once, and take
their way through memory.

Shapes: T tokens, K inputs.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from triton import TritonError

from worker.devices.device import Device
from worker.devices.trial import ROUNDING, Outcome, TimedTrial, first_line, relative_error
from worker.gpu.quantized.float8_products import Float8Product
from worker.gpu.quantized.products import CodeProduct

log = logging.getLogger(__name__)

SIZES = (64, 128, 256)
"""Rows of a trial. With still more, writing numbers is a smaller part of the product."""
SIZES_OF_TILES = (64, 128)
SIZES_OF_FLOAT8 = (32, 64)
_LEAST_GAIN = 1.02
_MOST_TIMED_LAYERS = 8
_SEED = 11


P = TypeVar("P", bound=CodeProduct | Float8Product)
Choose = Callable[[list[P], Device, torch.dtype], list[str]]
"""Make a choice for products that are alike, and return what was found, by rows."""


def choose_by_rows(products: Iterable[object], device: Device, dtype: torch.dtype) -> None:
    """Make all three choices for the products of codes among others."""
    listed = list(products)
    choose_few_rows((each for each in listed if isinstance(each, Float8Product)), device, dtype)
    codes = [each for each in listed if isinstance(each, CodeProduct)]
    choose_tiles_by_time(codes, device, dtype)
    choose_many_rows(codes, device, dtype)


def choose_many_rows(products: Iterable[CodeProduct], device: Device, dtype: torch.dtype) -> None:
    """Time both ways, and take numbers from the first size on at which they are faster."""
    _choose_each(products, device, dtype, _choose_numbers, "numbers for codes")


def choose_tiles_by_time(products: Iterable[CodeProduct], device: Device, dtype: torch.dtype) -> None:
    """Take other tiles where they are faster."""
    _choose_each(products, device, dtype, _choose_tiles, "other tiles of codes")


def choose_few_rows(products: Iterable[Float8Product], device: Device, dtype: torch.dtype) -> None:
    """Time both kernels, and take that of codes up to the last size at which it is faster."""
    _choose_each(products, device, dtype, _choose_codes, "codes for torch's product")


def _choose_each(
    products: Iterable[P], device: Device, dtype: torch.dtype, choose: Choose[P], what: str
) -> None:
    if dtype is torch.float32:
        return  # numbers would be the same, and this is for trials
    kinds: dict[str, list[P]] = defaultdict(list)
    for product in products:
        kinds[product.describe()].append(product)
    # The largest first: memory that it leaves is enough for the others.
    for named, alike in sorted(
        kinds.items(), key=lambda each: -each[1][0].num_outputs * each[1][0].num_inputs
    ):
        try:
            with torch.inference_mode():
                words = choose(alike, device, dtype)
        except (TritonError, RuntimeError) as error:  # a smaller device may not have room
            log.warning("%s of %s cannot be tried: %s; the usual way stays", what, named, first_line(error))
            continue
        if words:
            log.info("product of %s, %s by rows: %s", named, what, ", ".join(words))


def _choose_numbers(alike: list[CodeProduct], device: Device, dtype: torch.dtype) -> list[str]:
    words: list[str] = []
    for size in SIZES:
        x_TK = _rows(size, alike[0], device, dtype)
        outcome = _try(alike, CodeProduct.multiply, CodeProduct.multiply_by_numbers, x_TK, device)
        if outcome is None:
            break
        words.append(f"{size}: {outcome.fault or outcome.times}")
        if outcome.is_faster:
            for product in alike:
                product.fewest_by_numbers = size
            break
    return words


def _choose_tiles(alike: list[CodeProduct], device: Device, dtype: torch.dtype) -> list[str]:
    """Compare each of the other tiles with the best so far."""
    words: list[str] = []
    for size in SIZES_OF_TILES:
        x_TK = _rows(size, alike[0], device, dtype)
        for tiles in alike[0].other_tiles(size, dtype):
            by_tiles = partial(CodeProduct.multiply_by_tiles, tiles=tiles)
            outcome = _try(alike, CodeProduct.multiply, by_tiles, x_TK, device)
            if outcome is None:
                return words
            words.append(f"{size} by {tiles.outputs} x {tiles.tokens}: {outcome.fault or outcome.times}")
            if outcome.is_faster:
                for product in alike:
                    product.take_tiles(size, dtype, tiles)
    return words


def _choose_codes(alike: list[Float8Product], device: Device, dtype: torch.dtype) -> list[str]:
    words: list[str] = []
    for size in SIZES_OF_FLOAT8:
        x_TK = _rows(size, alike[0], device, dtype)
        outcome = _try(alike, Float8Product.multiply_many, Float8Product.multiply_few, x_TK, device)
        if outcome is None:
            break
        words.append(f"{size}: {outcome.fault or outcome.times}")
        if not outcome.is_faster:
            break
        for product in alike:
            product.most_few_rows = size
    return words


def _try(
    alike: list[P],
    usual: Callable[[P, Tensor], Tensor],
    other: Callable[[P, Tensor], Tensor],
    x_TK: Tensor,
    device: Device,
) -> Outcome | None:
    """Compare the results of the first product, and time both ways over several."""
    by_usual, by_other = (
        [partial(way, product, x_TK) for product in alike[:_MOST_TIMED_LAYERS]] for way in (usual, other)
    )

    def find_fault() -> str:
        expected_TN, found_TN = by_usual[0](), by_other[0]()
        error = relative_error(found_TN.float(), expected_TN.float())
        return "" if error <= ROUNDING[found_TN.dtype] else f"wrong by {error:.1e}"

    return TimedTrial(by_usual, by_other, _LEAST_GAIN, find_fault).run(device)


def _rows(size: int, product: CodeProduct | Float8Product, device: Device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)  # zeros would take less power, and time
    return torch.randn((size, product.num_inputs), generator=generator).to(device.torch_device, dtype)
