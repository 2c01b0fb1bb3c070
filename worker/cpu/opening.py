"""Whether this worker computes with the CPU's kernels, and why not.

Owns: the one line of the log that says so.
Never: fails a start that torch alone could serve: it computes the same, more slowly.
"""

import logging

import torch

from worker.config import WorkerConfig
from worker.cpu.build import CannotBuild, build_library, find_library
from worker.cpu.native import DTYPES, Kernels
from worker.device import Device
from worker.errors import StartupError
from worker.progress import LoadStage, Stage

log = logging.getLogger(__name__)


def open_kernels(
    config: WorkerConfig, device: Device, dtype: torch.dtype, stage: LoadStage
) -> Kernels | None:
    """Build them if need be, some seconds once for each machine; None where there are none.

    Raises StartupError if weights are to be quantized, which only the kernels can.
    """
    try:
        if device.torch_device.type != "cpu":
            raise CannotBuild("the model runs on a GPU")
        if config.cpu_kernels == "off":
            raise CannotBuild("--cpu-kernels is off")
        if dtype not in DTYPES:
            raise CannotBuild(f"there are none for {dtype}")
        library = find_library()
        if library is None:
            stage.enter(Stage.COMPILING)
            library = build_library()
        return Kernels(library, torch.get_num_threads())
    except (CannotBuild, OSError) as error:
        if config.quantization != "none":
            raise StartupError(
                f"--quantization {config.quantization} needs the CPU kernels, and {error}",
                fix="leave it out, or see --cpu-kernels",
            ) from error
        log.info("no CPU kernels, torch computes: %s", error)
        return None
