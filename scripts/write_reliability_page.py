"""Write the results of a test run into docs/reliability.md.

    python -m pytest --junit-xml results.xml
    python scripts/write_reliability_page.py results.xml

Owns: the last column of the table of faults, and the lines between the marks of the results.
Never: runs a test, or says more of the machine than how large it is.
"""

import os
import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
RESULTS_BEGIN, RESULTS_END = "<!-- results: begin -->", "<!-- results: end -->"
FAULTS_BEGIN, FAULTS_END = "<!-- faults: begin -->", "<!-- faults: end -->"
TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@dataclass
class TestRun:
    """Outcomes by test, `tests/a/test_b.py::test_c` without its parameters."""

    date: str
    seconds: float
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)

    def of(self, file: str, test: str) -> Counter[str]:
        """Of one test, or of all in a file where it is empty."""
        if test:
            return self.outcomes.get(f"{file}::{test}", Counter())
        found = (counts for name, counts in self.outcomes.items() if name.startswith(f"{file}::"))
        return sum(found, Counter())


def read_run(path: Path) -> TestRun:
    """The file that pytest writes with --junit-xml. Raises ValueError if it is not one."""
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except ElementTree.ParseError as error:
        raise ValueError(f"{path} is not XML: {error}") from None
    if not suites:
        raise ValueError(f"{path} has no results of tests")
    run = TestRun(
        date=suites[0].get("timestamp", "")[:10], seconds=sum(float(suite.get("time", 0)) for suite in suites)
    )
    for case in (case for suite in suites for case in suite.iter("testcase")):
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = f"{file}::{case.get('name', '').partition('[')[0]}"
        run.outcomes.setdefault(name, Counter())[_outcome(case)] += 1
    return run


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def result_of(run: TestRun, row: str) -> str:
    """What the tests that a row names have come to, the worst first."""
    each = [run.of(file, test) for file, test in TEST_NAME.findall(row)]
    counts = sum(each, Counter())
    words = [f"{counts[outcome]} {outcome}" for outcome in ("failed", "skipped", "passed") if counts[outcome]]
    if not all(each):
        words.insert(0, "not run")
    return ", ".join(words)


def render(run: TestRun) -> str:
    counts = sum(run.outcomes.values(), Counter())
    folders: dict[str, Counter[str]] = {}
    for name, outcome in run.outcomes.items():
        folders.setdefault(name.rpartition("/")[0], Counter()).update(outcome)
    lines = [
        f"Latest run: {run.date}, {_machine()}; {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['skipped']} skipped in {run.seconds / 60:.0f} minutes.",
        "",
        "| Folder | Passed | Failed | Skipped |",
        "|---|---|---|---|",
    ]
    for folder, of_folder in sorted(folders.items()):
        cells = " | ".join(str(of_folder[outcome]) for outcome in ("passed", "failed", "skipped"))
        lines.append(f"| {folder} | {cells} |")
    return "\n".join(lines)


def _machine() -> str:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {memory_bytes / 2**30:.0f} GiB, "
        f"{platform.system()}, Python {platform.python_version()}"
    )


def insert(page: str, run: TestRun) -> str:
    """The page with the results of `run`. Raises ValueError if a mark is missing."""
    before, faults, after = _cut(page, FAULTS_BEGIN, FAULTS_END)
    rows = [
        re.sub(r"\|[^|]*\|$", f"| {result_of(run, row)} |", row) if TEST_NAME.search(row) else row
        for row in faults.split("\n")
    ]
    page = before + "\n".join(rows) + after
    before, _, after = _cut(page, RESULTS_BEGIN, RESULTS_END)
    return f"{before}\n\n{render(run)}\n\n{after}"


def _cut(page: str, begin: str, end: str) -> tuple[str, str, str]:
    """Up to the first mark, what is between, and from the second on."""
    start, stop = page.find(begin), page.find(end)
    if start < 0 or stop < start:
        raise ValueError(f"{PAGE.name} lacks {begin} or {end}")
    start += len(begin)
    return page[:start], page[start:stop], page[stop:]


def main(arguments: list[str]) -> int:
    try:
        (results,) = arguments
        run = read_run(Path(results))
    except (OSError, ValueError) as error:
        print(f"write_reliability_page: {error}; give the file of pytest --junit-xml", file=sys.stderr)
        return 2
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), run), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
