"""The day leaves out what is marked, and loses no pair of values; the night loses no three."""

import os
import re
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.tiers import LONGEST, covering

ROOT = Path(__file__).resolve().parents[1]


def groups(rows, num):
    return {each for row in rows for each in combinations(enumerate(row), num)}


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((5, 2, 9, 5, 2), 60), ((5, 2, 9, 6), 60), ((3, 3, 3, 3), 15), ((4, 7), 28), ((6,), 6)],
)
def test_a_few_rows_of_a_product_hold_all_its_pairs(sizes, most):
    rows = list(product(*map(range, sizes)))
    chosen = [rows[place] for place in covering(rows)]
    assert groups(chosen, 2) == groups(rows, 2)
    assert {row[0] for row in chosen} == set(range(sizes[0]))
    assert len(chosen) <= most


def test_more_rows_hold_every_three_values_and_those_that_were_kept():
    rows = list(product(range(5), range(2), range(9), range(5), range(2)))
    kept = covering(rows)
    chosen = covering(rows, 3, kept=kept)
    assert kept < chosen
    assert groups([rows[place] for place in chosen], 3) == groups(rows, 3)
    assert len(chosen) < 260


def test_a_product_with_holes_loses_no_pair_that_it_has():
    rows = [row for row in product(range(4), range(5), range(3)) if sum(row) % 4]
    assert groups([rows[place] for place in covering(rows)], 2) == groups(rows, 2)


FILE = """
import pytest

def test_plain(): pass
@pytest.mark.night
def test_long(): pass
@pytest.mark.alone
def test_crowd(): pass
@pytest.mark.pairs
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [3, 4])
@pytest.mark.parametrize("c", [5, 6])
@pytest.mark.parametrize("d", [7, 8])
def test_product(a, b, c, d): pass
@pytest.mark.night
@pytest.mark.pairs
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [3, 4])
@pytest.mark.parametrize("c", [5, 6])
def test_long_pairs(a, b, c): pass
"""
OF_THE_DAY = """
from pathlib import Path

Path("day.read").touch()
def test_of_the_day(): pass
"""
OF_THE_NIGHT = (
    OF_THE_DAY.replace("day", "night") + "import pytest\npytestmark = [\n    pytest.mark.night,\n]\n"
)
HISTORIES = (
    "# tests.properties"
    + """.lengths
def test_histories(): pass
"""
)
FILES = {"test_some": FILE, "test_day": OF_THE_DAY, "test_night": OF_THE_NIGHT}
HIDDEN = """
import pytest

def test_hidden(): pass
test_hidden = getattr(pytest.mark, "night")(test_hidden)
"""
MARKS = """
[tool.pytest.ini_options]
testpaths = ["tests"]
markers = ["night", "alone", "pairs"]
"""


def run(folder, files, words, times="1"):
    """Output of pytest for these files, with the rules of our tests."""
    for name, text in files.items():
        file = folder / "tests" / f"{name}.py"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(text)
    (folder / "pyproject.toml").write_text(MARKS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-vp", "no:cacheprovider", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HISTORIES": times}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "long", "crowds", "cases", "read"),
    [
        ((), 0, 0, 6, ["day.read"]),
        pytest.param(("-n", "2"), 0, 0, 6, ["day.read"], marks=pytest.mark.night),
        (("-m", "night"), 5, 0, 4, ["night.read"]),
        (("tests",), 5, 1, 10, ["day.read", "night.read"]),
    ],
    ids=str,
)
def test_by_default_the_day_runs_what_is_named_runs_whole_and_other_files_are_not_read(
    tmp_path, words, long, crowds, cases, read
):
    ran = run(tmp_path, FILES, words)
    found = [
        len(re.findall(f"test_{name}.* PASSED|PASSED.*test_{name}", ran))
        for name in ("long", "crowd", "product")
    ]
    assert found == [long, crowds, cases], ran
    assert sorted(file.name for file in tmp_path.glob("*.read")) == read


def test_a_file_that_would_be_left_out_unread_although_it_has_tests_of_the_night_is_an_error(tmp_path):
    assert "test_hidden.py has tests of the tier 'night'" in run(tmp_path, {"test_hidden": HIDDEN}, ())


def test_histories_run_by_night_where_their_number_is_multiplied(tmp_path):
    ran = run(
        tmp_path, {"properties/test_long": HISTORIES, "test_day": OF_THE_DAY}, ("-m", "night"), times="5"
    )
    assert "1 passed" in ran
    assert "test_histories PASSED" in ran
    assert not (tmp_path / "day.read").exists()


def test_the_longest_files_are_there_and_run_first(tmp_path):
    assert [end for end in LONGEST if not [*ROOT.glob(f"tests/**/{end}")]] == []
    plain = "def test_it(): pass\n"
    ran = run(tmp_path, {"a/test_a": plain, LONGEST[1].removesuffix(".py"): plain}, ())
    assert re.findall(r"^tests/(\S+)::", ran, flags=re.MULTILINE) == [LONGEST[1], "a/test_a.py"]


def test_files_that_share_what_takes_long_to_start_run_in_one_process(tmp_path):
    shared = "def test_of_one(demo_server): pass\ndef test_of_two(demo_server): pass\n"
    alone = shared.replace("demo_server", "tmp_path")
    fixture = "import pytest\n\n@pytest.fixture\ndef demo_server(): pass\n"
    files = {"conftest": fixture, "test_a": shared, "test_b": shared, "test_c": alone}
    ran = run(tmp_path, files, ("-n", "2", "--dist", "loadfile"))
    found = {file: set(re.findall(rf"\[(gw\d)\].* PASSED tests/test_{file}\.py", ran)) for file in "abc"}
    assert found["a"] == found["b"] != found["c"], ran
    assert len(found["a"]) == 1
