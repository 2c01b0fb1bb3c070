"""The part `chain`: the products of a model's layers in one kernel, and the same by cuBLAS in a graph.

Owns: the buffers of the kernel, and the check against torch.

Shapes: R rows, N outputs, K inputs.
"""

import ctypes
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from campaigns.gpu.device_facts import seconds_of_call
from campaigns.gpu.one_kernel.launching import (
    SHARED_BYTES,
    SOURCE,
    TILE_BYTES,
    Kernel,
    compile_cubin,
    seconds_of,
)
from campaigns.gpu.results import Record
from campaigns.gpu.shapes import SHAPES, Shape, products_of
from worker.devices.device import Device, open_device
from worker.devices.trial import first_line, relative_error
from worker.worker_config import WorkerConfig

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_STATIC_BYTES = 9216
_MOST_STAGES = 12
_LAYERS = {"qwen3-0.6b": 28, "llama-3.1-8b": 8}
_SPLITS = {"qwen3-0.6b": (1, 2, 1, 2), "llama-3.1-8b": (1, 1, 1, 1)}
_LARGEST_ERROR = 2e-2
_NUM_TAGS = 4


class _Phase(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("outputs", "inputs", "splits")),
    )


class _Chain(ctypes.Structure):
    """Argument of the kernel: `Chain` of one_kernel.cu."""

    _fields_ = (
        ("phases", _Phase * 4),
        ("layer_stride", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("layers", "rows", "stages")),
        ("exchange", ctypes.c_void_p),
        ("exchange_stride", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
    )


def run(record: Record, settings: "Settings") -> None:
    """Raises RuntimeError where the driver refuses the kernel."""
    if settings.is_smoke:
        _rehearse(record, settings.out)
    cubin = None if settings.is_smoke else compile_cubin()
    device = None if settings.is_smoke else open_device(WorkerConfig(model_path="", device="cuda"))
    table = record.table(
        "The products of a layer in one kernel",
        *("Shape", "Rows", "Stages", "Error", "A layer", "cuBLAS in a graph"),
    )
    for name, num_layers in ({"qwen3-0.6b": 2} if settings.is_smoke else _LAYERS).items():
        layers = _Layers(SHAPES[name], _SPLITS[name], num_layers, device)
        for rows in (1, 2, 4):
            try:
                stages, error, seconds = layers.measure(cubin, rows)
                by_cublas = seconds_of_call(partial(layers.by_cublas, layers.x(rows), num_layers), device)
            except RuntimeError as refusal:
                table.add(name, rows, "-", first_line(refusal)[:80], "-", "-")
                continue
            shown = f"{error:.1e}{'' if error <= _LARGEST_ERROR else ' WRONG'}"
            times = (f"{each * 1e6:.2f} us" for each in (seconds, by_cublas / num_layers))
            table.add(name, rows, stages, shown, *times)
            record.figure(f"chain_{name}_{rows}", seconds)


class _Layers:
    """The weights of some layers, as the kernel and as torch have them."""

    def __init__(self, shape: Shape, splits: tuple[int, ...], num_layers: int, device: Device | None) -> None:
        self._sizes, self._splits, self._num_layers = products_of(shape), splits, num_layers
        self._place = torch.device("cpu" if device is None else "cuda")
        self._blocks = 2 if device is None else device.num_processors
        counts = [outputs * inputs for outputs, inputs in self._sizes]
        self._memory = torch.empty(
            num_layers, sum(counts), dtype=torch.bfloat16, device=self._place
        ).normal_()
        self._weights = []
        for part_LN, (outputs, inputs) in zip(
            torch.split(self._memory, counts, dim=1), self._sizes, strict=True
        ):
            part_LN.mul_(inputs**-0.5)  # so that sums are of the size of x
            self._weights.append(part_LN.view(num_layers, outputs, inputs))

    def x(self, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, self._sizes[0][1], generator=generator).to(self._place, torch.bfloat16)

    def by_cublas(self, x_RK: Tensor, num_layers: int) -> Tensor:
        for layer in range(num_layers):
            for weights_LNK in self._weights:
                x_RK = linear(x_RK[:, : weights_LNK.shape[2]], weights_LNK[layer])
        return x_RK

    def measure(self, cubin: bytes | None, rows: int) -> tuple[int, float, float]:
        """Return the stages of the ring, the error against torch, and the seconds of a layer."""
        x_bytes = rows * (2 * max(inputs for _, inputs in self._sizes) + 16)
        room = SHARED_BYTES - _STATIC_BYTES - 256 - x_bytes
        stages = min(_MOST_STAGES, room // (TILE_BYTES + 16))
        kernel = Kernel(cubin, "chain", shared_bytes=stages * (TILE_BYTES + 16) + 256 + x_bytes)
        stride = max(
            split * rows * outputs // 2 for split, (outputs, _) in zip(self._splits, self._sizes, strict=True)
        )
        stride = max(stride, rows * self._sizes[0][1] // 2)
        exchange = torch.zeros(_NUM_TAGS * stride, dtype=torch.int64, device=self._place)
        x_RK, half = self.x(rows), self._num_layers // 2
        words = x_RK.view(torch.int32).flatten().to(torch.int64) & 0xFFFFFFFF
        epoch = 0

        def begin() -> None:
            nonlocal epoch
            epoch += 4 * self._num_layers + 1  # no word of an earlier launch has a number of this one
            at = epoch % _NUM_TAGS * stride
            exchange[at : at + len(words)] = words | epoch << 32

        def launching(layers: int) -> Callable[[], None]:
            return lambda: kernel.launch(
                self._blocks, self._argument(layers, rows, stages, exchange, stride, epoch)
            )

        part_s, whole_s = seconds_of(begin, launching(half)), seconds_of(begin, launching(self._num_layers))
        error = 0.0
        if cubin is not None:
            outputs, split = self._sizes[3][0], self._splits[3]
            at = (epoch + 4 * self._num_layers) % _NUM_TAGS * stride
            words = exchange[at : at + split * rows * outputs // 2].view(torch.int32)[::2]
            found_RN = words.contiguous().view(torch.bfloat16).view(split, rows, outputs).float().sum(0)
            error = relative_error(found_RN, self.by_cublas(x_RK, self._num_layers).float())
        return stages, error, (whole_s - part_s) / (self._num_layers - half)

    def _argument(
        self, layers: int, rows: int, stages: int, exchange: Tensor, stride: int, epoch: int
    ) -> _Chain:
        phases = (_Phase * 4)(
            *(
                _Phase(weight.data_ptr(), *size, split)
                for weight, size, split in zip(self._weights, self._sizes, self._splits, strict=True)
            )
        )
        return _Chain(
            *(phases, self._memory.shape[1], layers, rows, stages),
            *(exchange.data_ptr(), stride, epoch),
        )


def _rehearse(record: Record, folder: Path) -> None:
    """Run the kernel's own source on the CPU: right, and with the same bits in any order of its threads."""
    program = folder / "rehearse"
    words = ("g++", "-O2", "-std=c++17", "-DREHEARSAL", "-w", "-o", program, SOURCE.with_name("rehearse.cpp"))
    subprocess.run(words, check=True)
    lines = subprocess.run((program, "2"), check=True, capture_output=True, text=True).stdout.splitlines()
    table = record.table("The kernel rehearsed on a CPU", "Found")
    for line in lines:
        table.add(line)
    if any("OTHER" in line for line in lines) or float(lines[0].split()[1]) > _LARGEST_ERROR:
        raise RuntimeError("the rehearsed kernel computes otherwise")
