"""The part `first`: begins the groups of trials, and makes one table of what they say.

Owns: the processes, and what is told of one that dies: which trial it was at, and with which inputs.
Never: imports torch in this process but to name the device; tries nothing itself.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from campaigns.gpu.first.group import INTERPRETED_NAMES, NAMES
from campaigns.gpu.first.software import describe_machine
from campaigns.gpu.results import Record, Table

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_ROOT = Path(__file__).resolve().parents[3]
_POLL_S = 0.2
_LONGEST_REMARK = 200
_MOST_DEATHS = 3


class FirstContactFailed(Exception):
    """Something that must work does not; the table says what."""


@dataclass(slots=True)
class Group:
    """The processes of one group, one after another."""

    name: str
    notes: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    is_done: bool = False
    num_deaths: int = 0
    """Processes of it that were not done."""

    def begin(self, settings: "Settings") -> None:
        command = [sys.executable, "-m", "campaigns.gpu.first.group", self.name, "--notes", str(self.notes)]
        command += ["--skip", str(len(self.outcomes()))] + ["--smoke"] * settings.is_smoke
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(command, cwd=_ROOT, stdout=stream, stderr=subprocess.STDOUT)

    def poll(self) -> None:
        """Take note of an end. Whatever broke the device is passed over by the next process."""
        if self.process is None or (status := self.process.poll()) is None:
            return
        self.process = None
        if status == 0:
            self.is_done = True
            return
        if not self._has_ended_in_order():
            self._write_death(status)
        self.num_deaths += 1
        # The trials of a model are built on one another. Where each is fatal, a few are enough to see that.
        self.is_done = self.name == "worker" or self.num_deaths >= _MOST_DEATHS

    def outcomes(self) -> list[dict[str, Any]]:
        """Trials that ended, each with its name, its inputs, whether it is right, a remark, its seconds."""
        found, current = [], dict[str, Any]()
        for line in self._lines():
            current |= line
            if "is_right" in line:
                found.append(current)
                current = {}
        return found

    def _lines(self) -> list[dict[str, Any]]:
        if not self.notes.exists():
            return []
        lines = self.notes.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _has_ended_in_order(self) -> bool:
        lines = self._lines()
        return bool(lines) and "is_right" in lines[-1]

    def _write_death(self, status: int) -> None:
        last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        remark = f"its process died with status {status}: {''.join(last)}"
        line = {"trial": "its beginning", "inputs": "-"} if not self._lines() else {}
        with self.notes.open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(line | {"is_right": False, "remark": remark, "took_s": 0.0}) + "\n")


def run(record: Record, settings: "Settings") -> None:
    """Raises FirstContactFailed."""
    has_gpu = not settings.is_smoke and torch.cuda.is_available()
    facts = record.table("What a report of a fault should say", "What", "Value")
    for name, value in describe_machine(device=torch.device("cuda" if has_gpu else "cpu")).items():
        facts.add(name, value)
    table = record.table("Trials", "Group", "Trial", "Inputs", "Verdict", "Seconds")
    groups = [_new_group(name, settings.out) for name in (INTERPRETED_NAMES if settings.is_smoke else NAMES)]
    most = max(1, (os.cpu_count() or 1) // (1 if has_gpu else 2))
    while not all(group.is_done for group in groups):
        _keep_busy(groups, most, settings)
        _tell(table, groups)
        time.sleep(_POLL_S)
    _tell(table, groups)
    _judge(record, groups)


def _new_group(name: str, out: Path) -> Group:
    group = Group(name, out / f"first-{name}.jsonl", out / f"first-{name}.log")
    for path in (group.notes, group.log):
        path.unlink(missing_ok=True)
    return group


def _keep_busy(groups: list[Group], most: int, settings: "Settings") -> None:
    for group in groups:
        group.poll()
    num_running = sum(group.process is not None for group in groups)
    for group in groups:
        if not group.is_done and group.process is None and num_running < most:
            group.begin(settings)
            num_running += 1


def _tell(table: Table, groups: list[Group]) -> None:
    table.replace(
        (
            group.name,
            each["trial"],
            each["inputs"],
            f"{'right' if each['is_right'] else 'WRONG'}: {each['remark'][:_LONGEST_REMARK]}",
            f"{each['took_s']:.1f}",
        )
        for group in groups
        for each in group.outcomes()
    )


def _judge(record: Record, groups: list[Group]) -> None:
    outcomes = [each for group in groups for each in group.outcomes()]
    wrong = [each for each in outcomes if not each["is_right"]]
    record.figure("num_right", len(outcomes) - len(wrong))
    record.figure("num_wrong", len(wrong))
    if wrong:
        first = wrong[0]
        raise FirstContactFailed(
            f"{len(wrong)} of {len(outcomes)} are wrong; the first: {first['trial']}, of {first['inputs']}: "
            f"{first['remark'][:_LONGEST_REMARK]}"
        )
    record.note(f"All {len(outcomes)} are right.")
