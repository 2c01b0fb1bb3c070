"""Cells in processes of their own: each simulates its part of the replicas, and writes its result as JSON.

Owns: the processes, and the form of a result between them.
Never: simulates (run.py); what a cell is does not depend on where it runs.
"""

import os
import subprocess
import sys
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from bench.simulate.replica import Stuck
from bench.simulate.run import RunResult, merged
from bench.simulate.tally import ClassTally

_PACKAGES = Path(__file__).resolve().parents[2]
STUCK_STATUS = 1
_ARRAYS = {"ttft_s": "d", "first_tokens": "q", "e2e_s": "d"}


def simulate_cells(words: Sequence[str], variant: str, num_cells: int) -> RunResult:
    """Run each cell of a variant in a process, as many at once as there are processors. Raises Stuck.

    `words` is the command line of `tokenyard simulate`: the workload is drawn there again.
    """
    commands = [[*words, f"--compare={variant}", f"--cell={cell}"] for cell in range(num_cells)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return merged(list(pool.map(_run, commands)))


def _run(words: Sequence[str]) -> RunResult:
    command = [sys.executable, "-P", "-m", "bench.simulate.command", *words]
    environment = os.environ | {"PYTHONPATH": str(_PACKAGES)}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    if done.returncode:
        raise Stuck(done.stderr.decode(errors="replace").strip() or f"a cell ended with {done.returncode}")
    return from_json(done.stdout)


def to_json(result: RunResult) -> bytes:
    """Write a result, to the last bit of each number."""
    facts = asdict(result)
    for tally, entry in zip(result.classes, facts["classes"], strict=True):
        entry["gaps"] = tally.gaps.items()
        for name in _ARRAYS:
            entry[name] = getattr(tally, name).tolist()
    return orjson.dumps(facts)


def from_json(document: bytes) -> RunResult:
    """Read what `to_json` wrote."""
    facts: dict[str, Any] = orjson.loads(document)
    facts["classes"] = tuple(_tally(entry) for entry in facts["classes"])
    facts["queue"] = tuple((at_s, num) for at_s, num in facts["queue"])
    facts["busy_s"], facts["kv_block_s"] = tuple(facts["busy_s"]), tuple(facts["kv_block_s"])
    return RunResult(**facts)


def _tally(entry: dict[str, Any]) -> ClassTally:
    gaps = entry.pop("gaps")
    for name, kind in _ARRAYS.items():
        entry[name] = array(kind, entry[name])
    tally = ClassTally(**entry)
    tally.gaps.include(gaps)
    return tally
