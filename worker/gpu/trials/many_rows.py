"""Products by codes of many rows: by our kernel, or by numbers that are written first.

Owns: the choice, for each kind of product, of the number of rows from which on cuBLAS multiplies numbers that
were written for it. A kernel that decodes does so once for each tile of rows; numbers are written once, and
take their way through memory.
Never: computes, or judges errors (gpu/quantized/proof.py).

Shapes: T tokens, K inputs.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from triton import TritonError

from worker.devices.device import Device
from worker.devices.trial import first_line
from worker.gpu.quantized.products import CodeProduct

log = logging.getLogger(__name__)

SIZES = (64, 128, 256)
"""Rows of a trial. With still more, writing numbers is a smaller part of the product."""
_LEAST_GAIN = 1.02
_MOST_TIMED_LAYERS = 8
_SEED = 11


def choose_many_rows(products: Iterable[CodeProduct], device: Device, dtype: torch.dtype) -> None:
    """Time both ways, and take numbers from the first size on at which they are faster."""
    if dtype is torch.float32:
        return  # numbers would be the same, and this is for trials
    kinds: dict[str, list[CodeProduct]] = defaultdict(list)
    for product in products:
        kinds[product.describe()].append(product)
    # The largest first: memory that it leaves is enough for the others.
    for alike in sorted(kinds.values(), key=lambda each: -each[0].num_outputs * each[0].num_inputs):
        try:
            _choose(alike, device, dtype)
        except (TritonError, RuntimeError) as error:  # a smaller device may not have room for numbers
            named = alike[0].describe()
            log.warning("numbers of %s cannot be tried: %s; codes stay", named, first_line(error))


@torch.inference_mode()
def _choose(alike: list[CodeProduct], device: Device, dtype: torch.dtype) -> None:
    timed, words = alike[:_MOST_TIMED_LAYERS], []
    generator = torch.Generator().manual_seed(_SEED)  # zeros would take less power, and time
    for size in SIZES:
        x_TK = torch.randn((size, alike[0].num_inputs), generator=generator).to(device.torch_device, dtype)
        by_codes, by_numbers = (
            _time([partial(way, product, x_TK) for product in timed], device)
            for way in (CodeProduct.multiply, CodeProduct.multiply_by_numbers)
        )
        if by_codes is None or by_numbers is None:
            return  # nothing is gained where time tells nothing
        words.append(f"{size}: {by_numbers * 1e6:.1f} us for {by_codes * 1e6:.1f} us")
        if by_numbers * _LEAST_GAIN < by_codes:
            for product in alike:
                product.fewest_by_numbers = size
            break
    log.info("product of %s, numbers for codes by rows: %s", alike[0].describe(), ", ".join(words))


def _time(calls: list[Callable[[], Tensor]], device: Device) -> float | None:
    """Measure one call, one after the other over weights that no cache holds together."""

    def work() -> None:
        for call in calls:
            call()

    seconds = device.seconds_of(work)
    return None if seconds is None else seconds / len(calls)
