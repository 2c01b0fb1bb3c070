"""Runs the parts one after the other, each in a process of its own.

Owns: the command line, the limits of time, and the page of results after each part.
Never: imports torch: a part that brings the device down must not bring the others down.
"""

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.catalogue import BY_NAME, PARTS, Part
from bench.gpu.results import PAGE, Record, write_page

_ROOT = Path(__file__).resolve().parents[2]
_LAST_WORDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What each part is told."""

    out: Path
    is_smoke: bool
    """Tiny shapes on the CPU, with Triton's interpreter: to try the parts, not the device."""
    shape: str = ""

    @property
    def target(self) -> str:
        return "interpreted" if self.is_smoke else "cuda"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure the GPU path on a GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the results go")
    parser.add_argument(
        "--parts",
        default=",".join(BY_NAME),
        metavar="NAME,...",
        help=f"of {', '.join(BY_NAME)}; default: all",
    )
    parser.add_argument(
        "--within", type=float, default=600.0, metavar="SECONDS", help="for all parts; default %(default)s"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, to try the command out")
    parser.add_argument("--inside", choices=BY_NAME, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        return _run_inside(BY_NAME[options.inside], options.out, options.smoke)
    names = options.parts.split(",")
    for name in names:
        if name not in BY_NAME:
            parser.error(f"no part is called {name!r}; there are {', '.join(BY_NAME)}")
    return _run_all([part for part in PARTS if part.name in names], options)


def _run_inside(part: Part, out: Path, is_smoke: bool) -> int:  # noqa: FBT001 - from the command line
    """In the part's own process."""
    record = Record(out, part.name)
    settings = Settings(out=out, is_smoke=is_smoke, shape=part.shape)
    importlib.import_module(part.module).run(record, settings)
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
        elif left_s < 1:
            end = "Skipped: no time was left"
        else:
            end, is_failed = _run(part, options, min(part.limit_s, left_s))
            num_failed += is_failed
        print(end, flush=True)
        ends.append((part.name, part.title, end))
        write_page(options.out, ends)
        (options.out / "ends.json").write_text(json.dumps(ends, indent=1), encoding="utf-8")
    print(options.out / PAGE)
    return num_failed


def _run(part: Part, options: argparse.Namespace, limit_s: float) -> tuple[str, bool]:
    """How it ended, and whether that is a failure. Ended by its limit, it leaves what it has found."""
    command = [sys.executable, "-m", "bench.gpu", "--inside", part.name, "--out", str(options.out.resolve())]
    variables = {
        **os.environ,
        "TRITON_INTERPRET": "1" if options.smoke else "0",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    started_s = time.monotonic()
    log = options.out / f"{part.name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command + ["--smoke"] * options.smoke,
            cwd=_ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=variables,
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
