"""Whether this worker computes with the CPU's kernels, and why not.

Owns: the one line of the log that says so.
Never: fails a start: without kernels torch computes the same, more slowly.
"""

import logging

import torch

from worker.config import WorkerConfig
from worker.cpu.build import CannotBuild, build_library, find_library
from worker.cpu.native import DTYPES, Kernels
from worker.device import Device
from worker.progress import LoadStage, Stage

log = logging.getLogger(__name__)


def open_kernels(
    config: WorkerConfig, device: Device, dtype: torch.dtype, stage: LoadStage
) -> Kernels | None:
    """Build them if need be, some seconds once for each machine; None where there are none."""
    if device.torch_device.type != "cpu" or config.cpu_kernels == "off":
        return None
    if dtype not in DTYPES:
        log.info("no CPU kernels for %s: torch computes", dtype)
        return None
    try:
        library = find_library()
        if library is None:
            stage.enter(Stage.COMPILING)
            library = build_library()
        return Kernels(library, torch.get_num_threads())
    except (CannotBuild, OSError) as error:
        log.warning("no CPU kernels, torch computes instead, more slowly: %s", error)
        return None
