"""Operations of torch and the driver of the worker, each once: memory, copies, events, streams, graphs.

Owns: tries of worker/devices/device.py on small memory, and of what it takes for granted.
Never: kernels of ours (the other trials).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from campaigns.gpu.first.trial import Build, Disagreement, Place, Trial
from worker.devices.block_copies import Pools, RowCopy
from worker.devices.device import Device
from worker.worker_config import WorkerConfig

_NUMEL = 1 << 20


def device_trials(place: Place, open_device: Callable[[WorkerConfig], Device]) -> list[Build]:
    """Raises what opening the device raises."""
    device = open_device(WorkerConfig(model_path="", device=place.device.type))
    trials = (
        Trial(name="the device is there", inputs="-", work=device.describe),
        Trial(name="a product", inputs="two 256x256", work=lambda: _product(place)),
        Trial(name="memory is told", inputs="-", work=lambda: _memory(device)),
        Trial(name="host array to the device", inputs=f"{_NUMEL} int64", work=lambda: _tensor(device)),
        Trial(name="pinned memory, both ways", inputs=f"{_NUMEL} int32", work=lambda: _pinned(device)),
        Trial(name="the host does not wait for a copy", inputs="-", work=lambda: _asynchronous(device)),
        Trial(name="swap, there and back", inputs="9 blocks of 4096 bytes", work=lambda: _swap(device)),
        Trial(name="a graph of torch", inputs="64 numbers", work=lambda: _graph(device)),
        Trial(name="a graph after one that failed", inputs="64 numbers", work=lambda: _failed_graph(device)),
    )
    return [partial(replace, trial) for trial in trials]


def _check(is_right: bool, what: str) -> None:  # noqa: FBT001 - the condition of an assertion
    if not is_right:
        raise Disagreement(what)


def _product(place: Place) -> str:
    left = place.random(256, 256)
    found, expected = (left @ left.T).cpu().float(), left.cpu().float() @ left.cpu().float().T
    _check(bool(((found - expected).abs() < 1.0).all()), "the product is wrong")
    return f"{torch.backends.cuda.matmul.allow_tf32=}".split(".")[-1]


def _memory(device: Device) -> str:
    free_bytes = device.free_bytes()
    budget_bytes = device.kv_cache_budget_bytes(lambda: None)
    _check(budget_bytes > 0, "no memory is left for the KV cache")
    return f"{free_bytes / 2**30:.1f} GiB free, {budget_bytes / 2**30:.1f} GiB for a cache"


def _tensor(device: Device) -> str:
    host = np.arange(_NUMEL)
    there = device.tensor(host.copy())
    _check(torch.equal(there.cpu(), torch.from_numpy(host)), "the copy is wrong")
    return str(there.device)


def _pinned(device: Device) -> str:
    there, up = device.zeros(_NUMEL, torch.int32), device.pinned(_NUMEL, torch.int32)
    up.copy_(torch.arange(_NUMEL, dtype=torch.int32))
    there.copy_(up, non_blocking=True)
    there += 1
    down = device.pinned(_NUMEL, torch.int32)
    down.copy_(there, non_blocking=True)
    device.record().wait()
    _check(torch.equal(down, torch.arange(_NUMEL, dtype=torch.int32) + 1), "what came back is wrong")
    return f"pinned: {up.is_pinned()}" if device.torch_device.type == "cuda" else "-"


def _asynchronous(device: Device) -> str:
    """Behind work of some milliseconds, asking must take a small part of them."""
    size = 2048 if device.torch_device.type == "cuda" else 64
    busy = device.zeros(size * size, torch.float32).view(size, size)
    target, pinned = device.zeros(_NUMEL, torch.int32), device.pinned(_NUMEL, torch.int32)
    device.wait()
    started_s = time.perf_counter()
    for _ in range(20):
        busy @ busy
    target.copy_(pinned, non_blocking=True)
    pinned.copy_(target, non_blocking=True)
    event = device.record()
    asked_s = time.perf_counter() - started_s
    event.wait()
    return f"asked in {asked_s * 1e3:.2f} ms, done after {(time.perf_counter() - started_s) * 1e3:.2f} ms"


def _swap(device: Device) -> str:
    rows, numel = 9, 1024
    pools = Pools(
        device_NE=device.zeros(rows * numel, torch.float32).view(rows, numel),
        host_ME=device.host_zeros(rows * numel, torch.float32).view(rows, numel),
    )
    pools.device_NE.copy_(torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, numel))
    device.wait()
    copier = device.open_copier(pools)
    copier.swap([RowCopy(1, 0), RowCopy(2, 1), RowCopy(3, 2), RowCopy(7, 5)], [])
    device.wait()
    pools.device_NE.zero_()
    device.wait()
    copier.swap([], [RowCopy(0, 4), RowCopy(1, 5), RowCopy(2, 6), RowCopy(5, 0)])
    device.wait()
    found = pools.device_NE[:, 0].tolist()
    _check(found == [7.0, 0, 0, 0, 1.0, 2.0, 3.0, 0, 0], f"the blocks hold {found}")
    return "streams in both directions"


def _graph(device: Device) -> str:
    source, target = device.zeros(64, torch.float32), device.zeros(64, torch.float32)
    graph = device.capture(_Doubling(source, target))
    for value in (3.0, 5.0):
        source.fill_(value)
        graph.replay()
        device.wait()
        _check(bool((target == 2 * value).all()), f"replayed on {value}, it gave {target[0].item()}")
    return "captured, and replayed twice"


class _Doubling:
    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target

    def __call__(self) -> None:
        self._target.copy_(self._source * 2)


def _failed_graph(device: Device) -> str:
    """Try that waiting for the device within a step is refused, and leaves nothing behind."""
    source = device.zeros(64, torch.float32)
    target = torch.zeros_like(source)

    def waits() -> None:
        target.fill_(float(source.sum().item()))

    refusal = "nothing was raised"
    try:
        device.capture(waits)
    except RuntimeError as error:
        refusal = str(error).splitlines()[0][:60]
    _graph(device)
    _check(refusal != "nothing was raised", "a capture that waits for the device was not refused")
    return refusal
