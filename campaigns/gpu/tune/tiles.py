"""The part `tiles`: the trials of a start by rows, over weights of random codes.

Owns: the weights, as a layer of Llama-3.1-8B has them. The log of the trials is the result (cli.py).
"""

import importlib
from typing import TYPE_CHECKING

import torch

from campaigns.gpu.results import Record
from campaigns.gpu.shapes import SHAPES, products_of
from campaigns.gpu.tune.random_codes import random_codes
from worker.devices.device import CpuDevice, Device, open_device
from worker.gpu.quantized.float8_products import Float8Product
from worker.gpu.quantized.products import CodeProduct
from worker.gpu.trials.many_rows import choose_by_rows
from worker.model.linear import Linear
from worker.worker_config import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from campaigns.gpu.cli import Settings

_NUM_COPIES = 6
"""More than caches hold: the smallest weight has 8 MiB."""


def run(_record: Record, settings: "Settings") -> None:
    if settings.is_smoke:
        importlib.import_module("tests.worker.gpu.interpreter").mend_interpreter()
        _run_trials("tiny", _Clockless(WorkerConfig(model_path="")))
    else:
        _run_trials("llama-3.1-8b", open_device(WorkerConfig(model_path="", device="cuda")))


class _Clockless(CpuDevice):
    """Runs what is timed, and has one time for all: to try the part out."""

    def seconds_of(self, work: "Callable[[], None]") -> float | None:
        work()
        return 1.0


def _run_trials(shape: str, device: Device) -> None:
    dtype = torch.float16 if device.torch_device.type == "cpu" else torch.bfloat16
    for size in products_of(SHAPES[shape]):
        for kind in ("float8", "int4 by 32", "int4 by 128, offsets"):
            several = [Linear.of(random_codes(kind, *size, device.torch_device)) for _ in range(_NUM_COPIES)]
            products: list[object] = [CodeProduct(each) for each in several]
            if kind == "float8":
                products += [Float8Product(each) for each in several]
            choose_by_rows(products, device, dtype)
