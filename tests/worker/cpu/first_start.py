"""The kernels as a server opens them at its start, built before if need be, and a product of theirs.

    python -m tests.worker.cpu.first_start

Says that it is ready, waits for a line, and prints the file that it has loaded and what it has computed.
"""

# A server's engine imports torch in the same way; any other takes two seconds longer.
# ruff: noqa: E402
from worker.devices.lazy_imports import import_torch

import_torch("cpu")

import hashlib
import sys
from pathlib import Path

import torch

from worker.cpu.kernel_choice import open_toolkit
from worker.cpu.native import pack
from worker.cpu.toolkit import CpuToolkit
from worker.devices.device import open_device
from worker.progress import LoadStage
from worker.worker_config import WorkerConfig


def main() -> None:
    torch.set_num_threads(1)
    config = WorkerConfig(model_path="", device="cpu")
    dice = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 64, generator=dice), torch.randn(32, 64, generator=dice)
    print("ready", flush=True)
    sys.stdin.readline()
    toolkit = open_toolkit(config, open_device(config), torch.float32, LoadStage())
    assert isinstance(toolkit, CpuToolkit), "there are no kernels"
    product = toolkit._kernels.multiply(x, pack(weight))
    assert torch.allclose(product, x @ weight.T, atol=1e-4)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[4] for line in maps if "kernels-" in line}
    print(*mapped, hashlib.sha256(product.numpy().tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
