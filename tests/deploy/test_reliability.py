"""The page of faults names tests that exist, and its results are those of a run."""

import ast
from pathlib import Path

import pytest

from scripts import write_reliability_page as writer
from tests.for_each import for_each

ROOT = Path(__file__).resolve().parents[2]
PAGE = writer.PAGE.read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and writer.TEST_NAME.search(line)]
RUN = """<?xml version="1.0"?><testsuites><testsuite time="90" timestamp="2026-01-02T03:04:05.6+00:00">
<testcase classname="tests.faults.test_machine" name="test_clock" time="1"/>
<testcase classname="tests.faults.test_machine" name="test_disk[full]" time="1"/>
<testcase classname="tests.faults.test_machine" name="test_disk[none]" time="1"><failure/></testcase>
<testcase classname="tests.server.edge.access.test_auth" name="test_key" time="1"><skipped/></testcase>
</testsuite></testsuites>"""


@for_each(ROWS, ids=lambda row: row.split(" | ")[0].strip("| "))
def test_every_test_that_a_row_names_exists(row: str) -> None:
    for file, test in writer.TEST_NAME.findall(row):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert not test or test in functions, f"{file} has no {test}"


def test_every_fault_has_a_test() -> None:
    _, faults, _ = writer._cut(PAGE, writer.FAULTS_BEGIN, writer.FAULTS_END)
    rows = [line for line in faults.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    assert [row for row in rows if not writer.TEST_NAME.search(row)] == []


@pytest.fixture
def run(tmp_path: Path) -> writer.TestRun:
    (tmp_path / "results.xml").write_text(RUN)
    return writer.read_run(tmp_path / "results.xml")


CLOCK, DISK, GONE, KEY = (
    "`tests/faults/test_machine.py::test_clock`",
    "`tests/faults/test_machine.py::test_disk`",
    "`tests/faults/test_machine.py::test_gone`",
    "`tests/server/edge/access/test_auth.py::test_key`",
)


@pytest.mark.parametrize(
    ("names", "result"),
    [
        (CLOCK, "1 passed"),
        (DISK, "1 failed, 1 passed"),
        ("`tests/faults/test_machine.py`", "1 failed, 2 passed"),
        (f"{KEY} {CLOCK}", "1 skipped, 1 passed"),
        (GONE, "not run"),
        (f"{GONE} {CLOCK}", "not run, 1 passed"),
    ],
)
def test_a_row_gets_what_its_tests_have_come_to(run: writer.TestRun, names: str, result: str) -> None:
    assert writer.result_of(run, f"| a fault | an end | {names} | |") == result


def test_a_run_can_be_written_again_and_says_where_and_when(run: writer.TestRun) -> None:
    once = writer.insert(PAGE, run)
    assert writer.insert(once, run) == once
    assert "Latest run: 2026-01-02, " in once
    assert "2 passed, 1 failed, 1 skipped in 2 minutes" in once
    assert "| tests/faults | 2 | 1 | 0 |" in once
    assert str(ROOT) not in once
    kept = [line.rpartition("|")[0].rpartition("|")[0] for line in PAGE.splitlines() if line in ROWS]
    assert all(line in once for line in kept), "only the last column changes"


def test_what_is_no_result_of_tests_is_refused(tmp_path: Path) -> None:
    for content in ("no xml", "<a/>"):
        (tmp_path / "results.xml").write_text(content)
        with pytest.raises(ValueError, match=r"results\.xml"):
            writer.read_run(tmp_path / "results.xml")
