"""The day leaves out what is marked, and loses no pair of values."""

import os
import re
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.tiers import covering

ROOT = Path(__file__).resolve().parents[1]


def pairs(rows):
    return {(a, row[a], b, row[b]) for row in rows for a, b in combinations(range(len(row)), 2)}


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((5, 2, 9, 5, 2), 60), ((5, 2, 9, 6), 60), ((3, 3, 3, 3), 15), ((4, 7), 28), ((6,), 6)],
)
def test_a_few_rows_of_a_product_hold_all_its_pairs(sizes, most):
    rows = list(product(*map(range, sizes)))
    chosen = [rows[place] for place in covering(rows)]
    assert pairs(chosen) == pairs(rows)
    assert {row[0] for row in chosen} == set(range(sizes[0]))
    assert len(chosen) <= most


def test_a_product_with_holes_loses_no_pair_that_it_has():
    rows = [row for row in product(range(4), range(5), range(3)) if sum(row) % 4]
    assert pairs([rows[place] for place in covering(rows)]) == pairs(rows)


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
def test_product(a, b, c): pass
"""
MARKS = """
[tool.pytest.ini_options]
testpaths = ["tests"]
markers = ["night", "alone", "pairs"]
"""


@pytest.mark.parametrize(
    ("words", "long", "crowds", "cases"),
    [((), 0, 0, 5), (("-n", "2"), 0, 0, 5), (("-m", "night"), 1, 0, 3), (("tests",), 1, 1, 8)],
    ids=str,
)
def test_by_default_the_day_runs_and_what_is_named_runs_whole(tmp_path, words, long, crowds, cases):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(FILE)
    (tmp_path / "pyproject.toml").write_text(MARKS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-vp", "no:cacheprovider", *words]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    ).stdout
    found = [
        len(re.findall(f"test_{name}.* PASSED|PASSED.*test_{name}", ran))
        for name in ("long", "crowd", "product")
    ]
    assert found == [long, crowds, cases], ran
