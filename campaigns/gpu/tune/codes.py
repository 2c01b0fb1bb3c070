"""The part `codes`: products by codes beside cuBLAS's by bfloat16, and by FP8.

Owns: the times of each kind of codes for the layers of a model.
Never: judges: the page has both side by side.

Shapes: N outputs, K inputs.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from campaigns.gpu.results import Record
from campaigns.gpu.shapes import SHAPES
from campaigns.gpu.tune.anchors import products_of
from campaigns.gpu.tune.random_codes import KINDS, random_codes
from campaigns.gpu.tune.timing import time_calls
from worker.devices.device import Device, open_device
from worker.gpu.quantized.float8_products import Float8Product
from worker.gpu.quantized.products import CodeProduct
from worker.model.linear import Linear
from worker.worker_config import WorkerConfig

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_TOKENS = (1, 8, 16, 32, 64, 128, 256, 2048)
_BEYOND_CACHES_BYTES = 192 << 20

Multiply = Callable[[Tensor], Tensor]


def run(record: Record, settings: "Settings") -> None:
    if settings.is_smoke:
        importlib.import_module("tests.worker.gpu.interpreter").mend_interpreter()
        _Codes(record, None).measure("tiny", (1, 3))
    else:
        device = open_device(WorkerConfig(model_path="", device="cuda"))
        _Codes(record, device).measure("llama-3.1-8b", _TOKENS)


class _Codes:
    def __init__(self, record: Record, device: Device | None) -> None:
        self._record, self._device = record, device
        self._place = torch.device("cpu" if device is None else "cuda")
        self._dtype = torch.float32 if device is None else torch.bfloat16

    def measure(self, shape: str, tokens: Sequence[int]) -> None:
        """Time the four products of a layer, added up."""
        makers: dict[str, Callable[[int, int], Multiply]] = {"bfloat16, cuBLAS": self._plain}
        makers |= {kind: partial(self._of_codes, kind) for kind in KINDS}
        if self._device is not None:
            makers["float8 by float8"] = self._float8_rows
        table = self._record.table(f"Products of a layer of {shape}, microseconds", "Tokens", *makers)
        times_us: dict[int, list[str]] = {count: [] for count in tokens}
        for name, make in makers.items():
            seconds = dict.fromkeys(tokens, 0.0)
            for num_outputs, num_inputs in products_of(SHAPES[shape])[:4]:
                num_copies = self._num_copies(num_outputs * num_inputs)
                several = [make(num_outputs, num_inputs) for _ in range(num_copies)]
                for count in tokens:
                    x_TK = torch.randn(count, num_inputs, device=self._place, dtype=self._dtype)
                    seconds[count] += time_calls([partial(each, x_TK) for each in several], self._device)
            for count in tokens:
                times_us[count].append(f"{seconds[count] * 1e6:.1f}")
                self._record.figure(f"{name}_{count}", seconds[count])
            table.replace(
                (count, *cells, *["-"] * (len(makers) - len(cells))) for count, cells in times_us.items()
            )

    def _num_copies(self, num_numbers: int) -> int:
        """Count as many as caches do not hold, at half a byte for each number."""
        return 1 if self._device is None else max(1, 2 * _BEYOND_CACHES_BYTES // num_numbers)

    def _plain(self, num_outputs: int, num_inputs: int) -> Multiply:
        weight_NK = torch.randn(num_outputs, num_inputs, device=self._place, dtype=self._dtype)
        return lambda x_TK: linear(x_TK, weight_NK)

    def _of_codes(self, kind: str, num_outputs: int, num_inputs: int) -> Multiply:
        return CodeProduct(Linear.of(random_codes(kind, num_outputs, num_inputs, self._place))).multiply

    def _float8_rows(self, num_outputs: int, num_inputs: int) -> Multiply:
        weight = random_codes("float8", num_outputs, num_inputs, self._place)
        return Float8Product(Linear.of(weight)).multiply
