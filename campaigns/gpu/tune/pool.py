"""The part `pool`: decodes whose blocks lie all over a pool of 100 GiB, beside some in one of 2 GiB.

Owns: the two pools. All layers of a block lie together, so that a layer's keys are small pieces far apart:
this tells what that costs (docs/benchmarks/gpu.md).
"""

import importlib
from functools import partial
from typing import TYPE_CHECKING

import torch

from campaigns.gpu.results import Record
from campaigns.gpu.shapes import SHAPES
from campaigns.gpu.tune.timing import time_calls
from campaigns.gpu.tune.workloads import AttentionInputs, Load
from worker.devices.device import Device, open_device
from worker.gpu.kernels.attention_decode import attend_decodes
from worker.worker_config import WorkerConfig

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_SHAPE = "llama-3.1-8b"
_LOADS = (Load(64, 1024, 1), Load(256, 1024, 1))
_POOLS = (2 << 30, 100 << 30)
_NUM_LAYERS = 32


def run(record: Record, settings: "Settings") -> None:
    table = record.table(
        "Decodes of one layer after the other", "Load", "Pool", "Time of a layer", "Slower by"
    )
    device: Device | None = None
    shape, loads, pools = _SHAPE, _LOADS, _POOLS
    if settings.is_smoke:
        importlib.import_module("tests.worker.gpu.interpreter").mend_interpreter()
        shape, loads, pools = "tiny", (Load(2, 9, 1), Load(3, 9, 1)), (1 << 12, 1 << 14)
    else:
        device = open_device(WorkerConfig(model_path="", device="cuda"))
    for load in loads:
        seconds: list[float] = []
        for num_bytes in pools:
            try:
                seconds.append(_time(shape, load, num_bytes, device))
            except torch.OutOfMemoryError as error:
                table.add(load, f"{num_bytes >> 20} MiB", str(error)[:60], "-")
                continue
            told = f"{seconds[-1] / seconds[0] - 1:.0%}"
            table.add(load, f"{num_bytes >> 20} MiB", f"{seconds[-1] * 1e6:.1f} us", told)
            record.figure(f"pool_{load.num_sequences}_{num_bytes >> 20}_mib", seconds[-1])


def _time(shape: str, load: Load, pool_bytes: int, device: Device | None) -> float:
    place = torch.device("cpu" if device is None else "cuda")
    dtype = torch.float32 if device is None else torch.bfloat16
    inputs = AttentionInputs(
        SHAPES[shape],
        load,
        place,
        dtype,
        pool_bytes=pool_bytes,
        num_layers=2 if device is None else _NUM_LAYERS,
    )
    arguments = (inputs.work, inputs.options, inputs.out_THD)
    calls = [partial(attend_decodes, inputs.queries_THD, layer, *arguments) for layer in inputs.layers]
    return time_calls(calls, device)
