"""Versions of the software, for reports of faults.

Owns: versions, and what the device may be asked for.
Never: fails for want of one of them: it is told as unknown.
"""

import importlib.metadata
import platform
import subprocess

import torch

_PACKAGES = ("triton", "transformers", "safetensors", "numpy")
_UNKNOWN = "unknown"


def describe_machine(*, device: torch.device) -> dict[str, str]:
    told = {"Python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        try:
            told[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            told[package] = "not installed"
    if device.type != "cuda":
        return told
    facts = torch.cuda.get_device_properties(device)
    return told | {
        "GPU": facts.name,
        "driver": _driver_version(),
        "CUDA of torch": str(torch.version.cuda),
        "compute capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": str(facts.multi_processor_count),
        "shared memory of a block": f"{getattr(facts, 'shared_memory_per_block_optin', _UNKNOWN)} bytes",
        "registers of a multiprocessor": str(getattr(facts, "regs_per_multiprocessor", _UNKNOWN)),
        "L2 cache": f"{facts.L2_cache_size >> 20} MiB",
        "memory": f"{facts.total_memory / 2**30:.1f} GiB",
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    return done.stdout.strip() or _UNKNOWN
