"""The tests of the kernels, on the device: each kernel against its definition in plain torch.

Owns: which tests are run so, and their outcome as a table. The tests build their tensors on the CPU;
tests/worker/gpu/conftest.py takes them to the device and back at every launch.
Never: the tests of graphs, which record what Triton's interpreter does, or those that compute nothing.
"""

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu.results import Record, Table

if TYPE_CHECKING:
    from bench.gpu.cli import Settings

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = _ROOT / "tests" / "worker" / "gpu"
_NOT_ON_A_DEVICE = {
    "test_attention_compiled.py",
    "test_graphs.py",
    "test_gpu_worker.py",
    "test_launch.py",
    "test_launch_scheduled.py",
}
_LONGEST_MESSAGE = 160
_POLL_S = 0.1
# The project's own options name plugins that may be missing here.
_INI = "[pytest]\naddopts = -q -ra --strict-markers\n"


class TestsFailed(Exception):
    """At least one kernel differs from its definition, or could not be tried."""


def run(record: Record, settings: "Settings") -> None:
    """Raises TestsFailed. All files at once: most of their time goes into compiling."""
    tests = record.table("Tests", "File", "Passed", "Failed", "Skipped", "Seconds")
    failures = record.table("Failures", "Test", "Message")
    running = {path: _begin(path, settings) for path in kernel_test_files(settings)}
    wrong = []
    while running:
        for path, process in [pair for pair in running.items() if pair[1].poll() is not None]:
            del running[path]
            _tell(_report(path, settings), path.name, tests, failures)
            if process.returncode:
                wrong.append(path.name)
        time.sleep(_POLL_S)
    if wrong:
        raise TestsFailed(f"failures in {', '.join(sorted(wrong))}")


def kernel_test_files(settings: "Settings") -> list[Path]:
    """Where there is only the interpreter, those that need not even that."""
    files = [path for path in sorted(_TESTS.glob("test_*.py")) if path.name not in _NOT_ON_A_DEVICE]
    return [path for path in files if not settings.is_smoke or path.name == "test_device_mirror.py"]


def _begin(path: Path, settings: "Settings") -> subprocess.Popen[bytes]:
    ini = settings.out / "pytest.ini"
    ini.write_text(_INI, encoding="utf-8")
    command = [
        *(sys.executable, "-m", "pytest", "-c", str(ini), "--rootdir", str(_ROOT)),
        *("-p", "bench.gpu.stand_ins", "-p", "no:cacheprovider"),
        *(f"--junitxml={_report(path, settings)}", str(path)),
    ]
    device = "cpu" if settings.is_smoke else "cuda"
    log = settings.out / f"{path.stem}.log"
    with log.open("wb") as stream:
        return subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**os.environ, "TOKENYARD_TEST_DEVICE": device},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def _report(path: Path, settings: "Settings") -> Path:
    return settings.out / f"{path.stem}.xml"


def _tell(report: Path, name: str, tests: Table, failures: Table) -> None:
    if not report.exists():
        failures.add(name, f"could not be run; {report.with_suffix('.log').name} says why")
        return
    counts: Counter[str] = Counter()
    seconds = 0.0
    for case in ET.parse(report).getroot().iter("testcase"):
        wrong = [each for each in case if each.tag in ("failure", "error")]
        counts["failed" if wrong else "skipped" if case.find("skipped") is not None else "passed"] += 1
        seconds += float(case.get("time", 0))
        for each in wrong:
            failures.add(f"{name}::{case.get('name')}", each.get("message", "")[:_LONGEST_MESSAGE])
    tests.add(name, counts["passed"], counts["failed"], counts["skipped"], f"{seconds:.1f}")
