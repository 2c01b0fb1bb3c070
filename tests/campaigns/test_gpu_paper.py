"""Promises of the kernels' machine code for an H100, and the reading of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.gpu.paper.machine_code import Kind, Part, read_machine_code

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300

TEXT = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R121], desc[UR10][R106.64], P6 ;
.L_x_1:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.U16 R8, desc[UR4][R2.64] ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32.BF16 R64, R60.reuse, R68, RZ ;
        /*0050*/              @P1 BRA `(.L_x_2) ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   BRA `(.L_x_3);
        /*00b0*/                   NOP;
"""


def names(part: Part) -> list[str]:
    return [each.name for each in part.instructions]


def test_loops_are_counted_apart_from_those_within_them() -> None:
    code = read_machine_code(TEXT)
    assert [names(loop) for loop in code.loops] == [["LDG", "LDG", "HGMMA", "BRA"], ["HMMA", "BRA"]]
    assert names(code.body) == ["LDC", "LDGSTS", "STG", "EXIT", "BRA"]


def test_widths_and_products_are_those_of_the_opcodes() -> None:
    code = read_machine_code(TEXT)
    outer, inner = code.loops
    assert code.widths("LDG", "LDGSTS") == {16: 2, 2: 1}
    assert code.widths("STG") == {8: 1}
    assert outer.loaded_bytes == 32 * 18
    assert code.body.copied_bytes == 32 * 16
    assert inner.products == 16 * 8 * 16
    assert outer.products == 64 * 128 * 16 // 4, "a warp's part of its group's"
    assert outer.by_kind[Kind.GLOBAL] == 2
    assert code.main_loop is outer


@pytest.fixture(scope="module")
def table() -> list[dict[str, str]]:
    """One line for each launch: decodes, prefills, and what is between a layer's products."""
    done = subprocess.run(
        [sys.executable, "-m", "campaigns.gpu.paper", "decode", "prefill", "between"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    ]
    of_kernels, of_steps = (
        [dict(zip(rows[start], row, strict=True)) for row in rows[start + 2 : end]]
        for start, end in ((0, -10), (-10, None))
    )
    assert len(of_steps) == 8
    assert all(float(step["Step ms"]) > float(step["Floor ms"]) for step in of_steps)
    return of_kernels


def test_nothing_is_spilled_and_all_is_read_and_written_sixteen_bytes_at_a_time(table) -> None:
    assert {row["Spilled"] for row in table} == {"0"}
    for row in table:
        if not row["Kernel"].startswith("list_"):  # one program, of a few numbers of each sequence
            assert "16 B" in row["Loads"], row
            assert "16 B" in row["Stores"], row


def test_decodes_wait_for_memory_and_for_nothing_else(table) -> None:
    decodes = [row for row in table if row["Kernel"] == "decode_kernel"]
    assert len(decodes) == 8
    for row in decodes:
        assert float(row["Clocks to issue"]) < float(row["memory clocks"]) / 4, row
        assert float(row["KiB in flight"]) >= 32, row
        assert int(row["Resident"]) >= 2, "one computes while the other's keys are on their way"


def test_prompts_keep_the_tensor_cores_busier_than_anything_else(table) -> None:
    prefills = [row for row in table if row["Kernel"] == "prefill_kernel"]
    assert {row["Bound by"] for row in prefills} == {"tensor"}
    for row in prefills:
        assert float(row["Clocks to issue"]) < float(row["tensor clocks"]), row


def test_what_is_between_products_takes_no_longer_than_its_bytes(table) -> None:
    """With as many tokens as a step has at most; where a kernel has branches, all of them count as issued."""
    rows = [row for row in table if row["Launch"].endswith("x 2048")]
    assert len(rows) == 8
    for row in rows:
        assert float(row["us"]) < 1.2 * float(row["Floor us"]), row
