"""Products by codes of many rows: by our kernel, or by numbers that are written first.

Owns: the choice, for each kind of product, of the number of rows from which on cuBLAS multiplies numbers that
were written for it. A kernel that decodes does so once for each tile of rows; numbers are written once, and
take their way through memory.

Shapes: T tokens, K inputs.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
from triton import TritonError

from worker.devices.device import Device
from worker.devices.trial import TimedTrial, first_line
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
            [partial(way, product, x_TK) for product in timed]
            for way in (CodeProduct.multiply, CodeProduct.multiply_by_numbers)
        )
        outcome = TimedTrial(by_codes, by_numbers, _LEAST_GAIN).run(device)
        if outcome is None:
            return
        words.append(f"{size}: {outcome.times}")
        if outcome.is_faster:
            for product in alike:
                product.fewest_by_numbers = size
            break
    log.info("product of %s, numbers for codes by rows: %s", alike[0].describe(), ", ".join(words))
