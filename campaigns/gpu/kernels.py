"""The tests of the kernels, on the device: each kernel against its definition in plain torch.

Owns: which tests are run so, and their outcome as a table. The tests build their tensors on the CPU;
tests/worker/gpu/conftest.py takes them to the device and back at every launch.
Never: the tests of graphs, which record what Triton's interpreter does, those that compute nothing, or those
whose GPU is played by the CPU.
"""

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from campaigns.gpu.results import Record, Table

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

Row = tuple[str, int, int, int, str]

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = _ROOT / "tests" / "worker" / "gpu"
# The longest first: most of their time goes into compiling, and each file has a process of its own.
KERNEL_TESTS = (
    "test_attention_kernels.py",
    "test_sampling_kernels.py",
    "test_layers_kernels.py",
    "test_experts.py",
    "test_sampling.py",
    "test_layers_fused.py",
    "test_step_buffers.py",
    "test_device_mirror.py",
)
_LONGEST_MESSAGE = 160
_POLL_S = 0.5
# The project's own options name plugins that may be missing here.
_INI = "[pytest]\naddopts = -v -ra --strict-markers\n"


class TestsFailed(Exception):
    """At least one kernel differs from its definition, or could not be tried."""


def run(record: Record, settings: "Settings") -> None:
    """Raises TestsFailed. All files at once."""
    tests = record.table("Tests", "File", "Passed", "Failed", "Skipped", "Seconds")
    failures = record.table("Failures", "Test", "Message")
    running = {path: _begin(path, settings) for path in kernel_test_files(settings)}
    ended: dict[str, Row] = {}
    wrong = []
    while running:
        for path, process in [pair for pair in running.items() if pair[1].poll() is not None]:
            del running[path]
            ended[path.name] = _read_report(_report(path, settings), path.name, failures)
            if process.returncode:
                wrong.append(path.name)
        tests.replace([*ended.values(), *(_so_far(path, settings) for path in running)])
        time.sleep(_POLL_S)
    if wrong:
        raise TestsFailed(f"failures in {', '.join(sorted(wrong))}")


def kernel_test_files(settings: "Settings") -> list[Path]:
    """Files of kernel tests; where there is only the interpreter, those that need not even that."""
    names = KERNEL_TESTS[-1:] if settings.is_smoke else KERNEL_TESTS
    return [_TESTS / name for name in names]


def _begin(path: Path, settings: "Settings") -> subprocess.Popen[bytes]:
    ini = settings.out / "pytest.ini"
    ini.write_text(_INI, encoding="utf-8")
    command = [
        *(sys.executable, "-m", "pytest", "-c", str(ini), "--rootdir", str(_ROOT)),
        *("-p", "campaigns.gpu.stand_ins", "-p", "no:cacheprovider"),
        *(f"--junitxml={_report(path, settings)}", str(path)),
    ]
    device = "cpu" if settings.is_smoke else "cuda"
    with _log(path, settings).open("wb") as stream:
        return subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**os.environ, "TOKENYARD_TEST_DEVICE": device},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def _report(path: Path, settings: "Settings") -> Path:
    return settings.out / f"{path.stem}.xml"


def _log(path: Path, settings: "Settings") -> Path:
    return settings.out / f"{path.stem}.log"


def _so_far(path: Path, settings: "Settings") -> Row:
    """Row of a test file that still runs: should this part be ended, that is what it leaves."""
    words = Counter(_log(path, settings).read_text(encoding="utf-8", errors="replace").split())
    return (path.name, words["PASSED"], words["FAILED"], words["SKIPPED"], "not done")


def _read_report(report: Path, name: str, failures: Table) -> Row:
    if not report.exists():
        failures.add(name, f"could not be run; {report.with_suffix('.log').name} says why")
        return (name, 0, 0, 0, "-")
    counts: Counter[str] = Counter()
    seconds = 0.0
    for case in ET.parse(report).getroot().iter("testcase"):
        wrong = [each for each in case if each.tag in ("failure", "error")]
        counts["failed" if wrong else "skipped" if case.find("skipped") is not None else "passed"] += 1
        seconds += float(case.get("time", 0))
        for each in wrong:
            failures.add(f"{name}::{case.get('name')}", each.get("message", "")[:_LONGEST_MESSAGE])
    return (name, counts["passed"], counts["failed"], counts["skipped"], f"{seconds:.1f}")
