"""Compiling by NVRTC, which torch's packages for CUDA bring, or by nvcc; launches through CUDA's driver.

Owns: the types of a launch's arguments, which are read from the source of the kernel.
Never: waits for the device.
"""

import ctypes
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("one_kernel.cu")
THREADS = 288
SHARED_BYTES = 227 << 10
"""Shared memory that a block of a Hopper GPU can have."""
TILE_BYTES = 16 * (512 * 2 + 16)
"""Bytes of a stage of the ring: its tile, and what keeps rows apart."""
_ARCH = "sm_90a"
_MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_NUM_TIMED = 5


class NotCompiled(Exception):
    """There is no compiler, or it refuses the source; the text is the compiler's."""


def compile_cubin() -> bytes:
    """Compile the kernels. Raises NotCompiled."""
    library = _nvrtc()
    if library is not None:
        return _by_nvrtc(library, SOURCE.read_text(encoding="utf-8").encode())
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise NotCompiled("neither NVRTC nor nvcc is installed")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "one_kernel.cubin"
        words: list[str | Path] = [
            nvcc,
            f"-gencode=arch=compute_90a,code={_ARCH}",
            "-O3",
            "-std=c++17",
            "-cubin",
            "-o",
            out,
        ]
        done = subprocess.run([*words, SOURCE], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotCompiled(done.stderr)
        return out.read_bytes()


def _nvrtc() -> Any:
    places = [each for folder in sys.path for each in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")]
    for name in (*map(str, sorted(places, reverse=True)), "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _by_nvrtc(library: Any, source: bytes) -> bytes:
    options = [f"--gpu-architecture={_ARCH}".encode(), b"-default-device", b"--std=c++17"]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"one_kernel.cu", 0, None, None)
    failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    what = "ProgramLog" if failed else "CUBIN"
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, found)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise NotCompiled(found.value.decode())
    return found.raw


def argument_types(name: str) -> list[Any]:
    """Read the types of a kernel's arguments; a structure's is None: it is passed as it is."""
    words = re.search(rf"\b{name}\(([^)]*)\) \{{", SOURCE.read_text(encoding="utf-8"))
    assert words is not None, name
    named = {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64}
    return [
        ctypes.c_void_p if "*" in each else named.get(each.split()[-2]) for each in words.group(1).split(",")
    ]


class Kernel:
    """One kernel, or with no cubin the launch of none: to try a part out where there is no GPU."""

    def __init__(self, cubin: bytes | None, name: str, *, shared_bytes: int = 0) -> None:
        """Raise RuntimeError if the driver refuses it."""
        self._name, self._shared_bytes = name, shared_bytes
        self._types, self._function = argument_types(name), ctypes.c_void_p()
        if cubin is None:
            self._driver: Any = None
            return
        self._driver, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), cubin))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        self._check(self._driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes))

    def launch(self, blocks: int, *values: Any, threads: int = THREADS) -> None:
        """Launch with all blocks side by side: refused, and no deadlock, where they do not find room."""
        words = [each if kind is None else kind(each) for kind, each in zip(self._types, values, strict=True)]
        if self._driver is None:
            return
        import torch

        pointers = (ctypes.c_void_p * len(words))(
            *(ctypes.cast(ctypes.pointer(each), ctypes.c_void_p) for each in words)
        )
        sizes = (blocks, 1, 1, threads, 1, 1, self._shared_bytes)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(self._driver.cuLaunchCooperativeKernel(self._function, *sizes, stream, pointers))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code} of the driver at {self._name}")


def seconds_of(before: Callable[[], object], launch: Callable[[], object]) -> float:
    """Return the median time of a launch, each after `before`, which is not timed; 1 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        before()
        launch()
        return 1.0
    new_event: Any = torch.cuda.Event  # torch leaves its constructor untyped
    times = []
    for _ in range(_NUM_TIMED + 1):
        begin, end = new_event(enable_timing=True), new_event(enable_timing=True)
        before()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times[1:])
