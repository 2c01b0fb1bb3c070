"""The choice between the CPU's kernels and torch.

Never: fails a start that torch alone could serve: it computes the same, more slowly.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from worker.attention.kv_cache import cache_dtype
from worker.cpu.arithmetic import choose_kernels, open_first, open_kernels, open_ways
from worker.cpu.kernel_build import CannotBuild, build_library, find_library, foresee_build
from worker.cpu.native import DTYPES, Kernels
from worker.cpu.toolkit import CpuToolkit
from worker.devices.device import Device, Reserve
from worker.doctor_findings import Finding, Verdict
from worker.model.quantization import (
    FLOAT8_ROWS,
    INT8_ROWS,
    refuse_quantization,
    refuse_rows,
    rounding_of,
)
from worker.model.toolkit import Toolkit
from worker.pictures.eyes import bytes_of_pictures
from worker.progress import LoadPhase, LoadStage
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

_TOPIC = "CPU kernels"
_AUTO = "auto"


def reserve(model: Any, dtype: torch.dtype) -> Reserve:
    """Reserve memory for pictures."""
    return Reserve(weight_bytes=bytes_of_pictures(model, dtype))


def open_toolkit(
    config: WorkerConfig, device: Device, dtype: torch.dtype, stage: LoadStage
) -> Toolkit | None:
    """Open the kernels, and build them if need be, some 20 s once for each machine; None without any.

    Raises StartupError if weights are to be quantized, which needs the kernels.
    """
    try:
        _check_wanted(config, device, dtype)
        is_own = config.cpu_kernels == _AUTO
        library = find_library(for_this_processor=is_own)
        if library is None:
            stage.enter(LoadPhase.COMPILING)
            library = build_library(for_this_processor=is_own)
        kernels = _open(config, library, dtype)
    except (CannotBuild, OSError) as error:
        _refuse_quantization(config, error)
        log.info("no CPU kernels, torch computes: %s", error)
        return None
    return CpuToolkit(kernels, device, rounding_of(config))


def _open(config: WorkerConfig, library: Path, dtype: torch.dtype) -> Kernels:
    """Open those that were asked for by name, or choose. Raises StartupError, OSError."""
    num_threads = torch.get_num_threads()
    if config.cpu_kernels != _AUTO:
        return _open_named(config, library, num_threads)
    if _is_measured(config, dtype):
        return choose_kernels(library, num_threads)
    return open_first(library, num_threads)


def _open_named(config: WorkerConfig, library: Path, num_threads: int) -> Kernels:
    try:
        return open_kernels(library, num_threads, config.cpu_kernels)
    except (ValueError, ArithmeticError) as error:
        raise StartupError(f"--cpu-kernels {config.cpu_kernels}: {error}", fix="leave it out") from error


def _is_measured(config: WorkerConfig, dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and config.num_ranks == 1


def foresee_kernels(config: WorkerConfig, device: Device, dtype: torch.dtype) -> Finding:
    """Foresee the result of `open_toolkit`, but for a compiler that fails; compiles nothing.

    Raises StartupError where it would.
    """
    try:
        _check_wanted(config, device, dtype)
        library = find_library(for_this_processor=config.cpu_kernels == _AUTO)
        if library is None:
            what = f"will be compiled at first start with {foresee_build().name}"
        else:
            what = f"{_foresee_names(config, library, dtype)}, built"
    except (CannotBuild, OSError) as error:
        _refuse_quantization(config, error)
        return _without(config, dtype, error)
    return Finding(topic=_TOPIC, verdict=Verdict.OK, what=what)


def _foresee_names(config: WorkerConfig, library: Path, dtype: torch.dtype) -> str:
    if config.cpu_kernels != _AUTO:
        return _open_named(config, library, num_threads=1).instruction_set
    if not _is_measured(config, dtype):
        return open_first(library, num_threads=1).instruction_set
    *others, last = (each.instruction_set for each in open_ways(library, num_threads=1))
    return f"the fastest of {', '.join(others)} and {last}, measured at start" if others else last


def _without(config: WorkerConfig, dtype: torch.dtype, error: Exception) -> Finding:
    if config.cpu_kernels == "off":
        return Finding(topic=_TOPIC, verdict=Verdict.OK, what="none, as asked for: torch computes")
    if dtype not in DTYPES:
        fix = "ask for --dtype bfloat16 or float32"
    else:
        fix = (
            "install g++ and see to a cache that this user alone may write to, or build them:"
            " docs/deploy.md says how"
        )
    what = f"none: {error}; torch computes, several times more slowly"
    return Finding(topic=_TOPIC, verdict=Verdict.WARNING, what=what, fix=fix)


def _check_wanted(config: WorkerConfig, device: Device, dtype: torch.dtype) -> None:
    if device.torch_device.type != "cpu":
        raise CannotBuild("the model runs on a GPU")
    refuse_rows(config, FLOAT8_ROWS, device="CPUs", known=INT8_ROWS)
    if config.cpu_kernels == "off":
        raise CannotBuild("--cpu-kernels is off")
    if cache_dtype(config.kv_cache_dtype, dtype) is not dtype:
        raise StartupError(
            f"--kv-cache-dtype {config.kv_cache_dtype} has no CPU kernel yet",
            fix="leave it out, or ask for --cpu-kernels off, which is several times slower",
        )
    if dtype not in DTYPES:
        raise CannotBuild(f"there are none for {dtype}")


def _refuse_quantization(config: WorkerConfig, error: Exception) -> None:
    refuse_quantization(
        config, f" needs the CPU kernels, and {error}", fix="leave it out, or see --cpu-kernels"
    )
