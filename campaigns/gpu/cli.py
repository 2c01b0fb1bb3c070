"""Runs the parts one after the other, each in a process of its own.

Owns: the command line, the limits of time, and the page of results after each part.
Never: imports torch: a part that brings the device down must not bring the others down.
"""

import argparse
import importlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.gpu.catalogue import BY_NAME, QUARTERS, Part
from campaigns.gpu.launches import LastLaunch
from campaigns.gpu.results import PAGE, Record, Table, write_page

_ROOT = Path(__file__).resolve().parents[2]
_LAST_WORDS = 600
_BLOCKING = "CUDA_LAUNCH_BLOCKING"
_DEVICE_FAILED = ("CUDA error", "Error [CUDA]")
_AGAIN = "-again"
_AGAIN_S = 60.0
_ENOUGH_BYTES = 24 << 30
"""For checkpoints of 16 GB, with room to spare."""
_SMOKE_PATIENCE = 3
"""An interpreter on a busy machine is given longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Arguments of each part."""

    out: Path
    is_smoke: bool
    """Tiny shapes on the CPU, with Triton's interpreter: to try the parts, not the device."""
    shape: str = ""
    scratch: Path | None = None
    options: dict[str, str] = field(default_factory=dict)
    """See Part."""
    batches: tuple[int, ...] = ()
    """See Part."""

    @property
    def checkpoints(self) -> Path:
        """A folder that the parts share, and that does not outlive them."""
        return self.scratch or self.out

    @property
    def target(self) -> str:
        return "interpreted" if self.is_smoke else "cuda"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns.gpu", description="Measure the GPU path on a GPU."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the results go")
    parser.add_argument(
        "--parts",
        default=",".join(BY_NAME),
        metavar="NAME,...",
        help=f"of {', '.join(BY_NAME)}; default: all",
    )
    parser.add_argument("--quarter", choices=QUARTERS, help="the parts for one quarter of an hour")
    parser.add_argument(
        "--within", type=float, default=570.0, metavar="SECONDS", help="for all parts; default %(default)s"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, to try the command out")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="limits of the parts times this, for a machine with a cold disk; default %(default)s",
    )
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--suffix", default="", help=argparse.SUPPRESS)
    parser.add_argument("--inside", choices=BY_NAME, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        part = BY_NAME[options.inside]
        settings = Settings(
            out=options.out,
            is_smoke=options.smoke,
            shape=part.shape,
            scratch=options.scratch,
            options=part.options,
            batches=part.batches,
        )
        return _run_inside(part, settings, Record(options.out, part.name + options.suffix))
    names = QUARTERS[options.quarter] if options.quarter else options.parts.split(",")
    for name in names:
        if name not in BY_NAME:
            parser.error(f"no part is called {name!r}; there are {', '.join(BY_NAME)}")
    with tempfile.TemporaryDirectory(dir=_roomiest_folder()) as folder:
        options.scratch = Path(folder)
        return _run_all([BY_NAME[name] for name in names], options)


def _roomiest_folder() -> str | None:
    """Return memory, which is faster than a disk, where it has room; None is where temporary files are."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free >= _ENOUGH_BYTES
    return str(memory) if has_room else None


class _TrialLog(logging.Handler):
    """Puts what trials at load say into the record of the part."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record
        self._table: Table | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self._table = self._table or self._record.table("Trials of the start", "Trial")
        self._table.add(record.getMessage())


def _run_inside(part: Part, settings: Settings, record: Record) -> int:
    """In the part's own process. Its last words name the error, and the last of our kernels before it."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
    handler = _TrialLog(record)
    for name in ("trials", "state_kernels"):
        logging.getLogger(f"worker.gpu.{name}").addHandler(handler)
    last_launch = LastLaunch()
    try:
        module, _, function = part.module.partition(":")
        getattr(importlib.import_module(module), function or "run")(record, settings)
    except Exception as error:  # noqa: BLE001 - it is printed, and the status says it
        traceback.print_exc()
        what, launch = (str(error).splitlines() or [""])[0], last_launch.describe()
        print(f"{type(error).__name__}: {what}{f'; the last launch was {launch}' if launch else ''}")
        return 1
    return 0


def _run_all(parts: Sequence[Part], options: argparse.Namespace) -> int:
    """Returns the number of parts that failed."""
    deadline_s = time.monotonic() + options.within
    ends: list[tuple[str, str, str]] = []
    num_failed = 0
    for part in parts:
        print(f"{part.name}: ", end="", flush=True)
        missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
        left_s = deadline_s - time.monotonic()
        if missing:
            end = f"Skipped: {', '.join(missing)} not installed"
        elif left_s < part.least_s:
            end = f"Skipped: {max(left_s, 0.0):.0f} s were left"
        else:
            limit_s = part.limit_s * options.patience * (_SMOKE_PATIENCE if options.smoke else 1)
            end, is_failed = _run(part, options, min(limit_s, left_s))
            num_failed += is_failed
            if is_failed and any(word in end for word in _DEVICE_FAILED):
                end += _where_it_failed(part, options, min(_AGAIN_S, deadline_s - time.monotonic()))
        print(end, flush=True)
        ends.append((part.name, part.title, end))
        write_page(options.out, ends)
    print(options.out / PAGE)
    return num_failed


def _where_it_failed(part: Part, options: argparse.Namespace, limit_s: float) -> str:
    """Once more, with the host waiting for each kernel: then the last one that was launched is the one."""
    if limit_s < 1:
        return ""
    end, _ = _run(part, options, limit_s, suffix=_AGAIN)
    return f" Again with {_BLOCKING}=1: {end}"


def _run(part: Part, options: argparse.Namespace, limit_s: float, *, suffix: str = "") -> tuple[str, bool]:
    """End of the part, and whether it is a failure. Ended by its limit, it leaves what it has found.

    With a suffix for the names of its files, the host waits for each kernel.
    """
    command = [sys.executable, "-m", "campaigns.gpu", "--inside", part.name, f"--suffix={suffix}"]
    command += ["--out", str(options.out.resolve()), "--scratch", str(options.scratch)]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1" if options.smoke else "0",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if suffix:
        environment[_BLOCKING] = "1"
    started_s = time.monotonic()
    log = options.out / f"{part.name}{suffix}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command + ["--smoke"] * options.smoke,
            cwd=_ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"Ended by its limit of {limit_s:.0f} s", True
        finally:
            _end_group(process)
    took = f"{time.monotonic() - started_s:.0f} s"
    if status:
        return f"Failed after {took}: {_last_words(log)}", True
    return f"Done in {took}", False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """A server that the part has started, too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:_LAST_WORDS] if lines else "it said nothing"
