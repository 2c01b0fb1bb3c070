"""python -m campaigns.gpu.paper: every kernel's machine code in one table, and decode steps in another."""

import argparse
import sys
from collections.abc import Mapping, Sequence

import triton

from campaigns.gpu.paper.launches import GROUPS, Case
from campaigns.gpu.paper.machine_code import Kind
from campaigns.gpu.paper.roofline import (
    BYTES_PER_CLOCK,
    BYTES_PER_S,
    NUM_PROCESSORS,
    bytes_in_flight,
    clocks_of,
    estimate,
    resident_programs,
)
from campaigns.gpu.paper.steps import GOALS, Step, all_steps

_KERNEL_HEADINGS = (
    *("Launch", "Kernel", "Grid", "Waves", "Resident", "Registers", "Spilled", "Shared KiB"),
    *("Loads", "Stores", "Issued", "tensor", "special", "float", "integer", "global", "shared", "barriers"),
    *("KiB loaded", "Clocks to issue", "tensor clocks", "special clocks", "memory clocks", "KiB in flight"),
    *("Floor us", "us", "Bound by"),
)
"""Columns from Issued to memory: of the main loop once, or of the kernel where it has none: instructions of
one warp, clocks of one program."""
_STEP_HEADINGS = (
    *("Model", "Sequences", "Launches", "Floor ms", "Launching", "Products", "Attention", "Others"),
    *("Step ms", "Tokens/s", "Goal"),
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.gpu.paper", description=__doc__)
    parser.add_argument(
        "groups", nargs="*", choices=[*GROUPS, []], help="of launches; default: all", metavar="GROUP"
    )
    groups = parser.parse_args(argv).groups or list(GROUPS)
    print(f"Triton {triton.__version__}\n")
    _write_row(_KERNEL_HEADINGS)
    _write_row(["---"] * len(_KERNEL_HEADINGS))
    cases = []
    for group in groups:
        for case in GROUPS[group]():
            cases.append(case)
            _write_row(_kernel_cells(case))
    if {"decode", "between"} <= set(groups):
        print()
        _write_row(_STEP_HEADINGS)
        _write_row(["---"] * len(_STEP_HEADINGS))
        for step in all_steps(cases):
            _write_row(_step_cells(step))
    return 0


def _write_row(cells: Sequence[object]) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _kernel_cells(case: Case) -> list[object]:
    launch, code = case.launch, case.launch.code
    registers, spilled_bytes = launch.resources
    resident = resident_programs(launch)
    part = code.main_loop or code.body
    clocks, loaded = clocks_of(part, launch.num_warps), part.loaded_bytes * launch.num_warps
    found = estimate(launch, num_working=case.num_working, trips=case.trips, moved_bytes=case.moved_bytes)
    return [
        case.name,
        launch.kernel,
        f"{'x'.join(map(str, launch.grid))} of {launch.num_warps} warps",
        f"{case.num_working / NUM_PROCESSORS / resident:.2f}",
        resident,
        registers,
        spilled_bytes,
        f"{launch.shared_bytes / 1024:.0f}",
        _widths(code.widths("LDG", "LDGSTS")),
        _widths(code.widths("STG")),
        len(part.instructions),
        part.count(Kind.TENSOR),
        part.count(Kind.SPECIAL),
        part.count(Kind.FLOAT, Kind.CONVERSION),
        part.count(Kind.INTEGER),
        part.count(Kind.GLOBAL),
        part.count(Kind.SHARED, Kind.SHUFFLE),
        part.count(Kind.BARRIER),
        f"{loaded / 1024:.1f}",
        f"{clocks.issue:.0f}",
        f"{clocks.tensor:.0f}",
        f"{clocks.special:.0f}",
        f"{loaded / BYTES_PER_CLOCK:.0f}",
        f"{bytes_in_flight(launch) / 1024:.0f}",
        f"{case.moved_bytes / BYTES_PER_S * 1e6:.2f}",
        f"{found.seconds * 1e6:.2f}",
        found.bound,
    ]


def _widths(widths: Mapping[int, int]) -> str:
    """Bytes of a thread, and how many instructions."""
    return ", ".join(f"{width} B: {count}" for width, count in sorted(widths.items(), reverse=True))


def _step_cells(step: Step) -> list[object]:
    parts_us = (step.launching_us, step.products_us, step.attention_us, step.others_us, step.us)
    return [
        step.model,
        step.num_sequences,
        step.num_launches,
        f"{step.floor_us / 1e3:.2f}",
        *(f"{us / 1e3:.2f}" for us in parts_us),
        f"{step.tokens_per_s:.0f}",
        GOALS.get((step.model, step.num_sequences), ""),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
