"""Subjects of commits: `area: what changes`, in at most 72 characters."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST = "7acdafd1"
"""The last commit before the rule."""
SUBJECT = re.compile(r"[a-z][a-z0-9 /_-]*: \S.*")


def faults(subjects: list[str]) -> list[str]:
    return [each for each in subjects if len(each) > 72 or not SUBJECT.fullmatch(each)]


def subjects_since(first: str) -> list[str]:
    """Subjects of the commits behind `first`, merges left out; skips the test where the history lacks it."""
    command = ["git", "log", "--no-merges", "--format=%s", f"{first}..HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no history back to {first}: {error}")
    return found.stdout.splitlines()


def test_subjects_of_commits_name_an_area_and_fit_a_line() -> None:
    assert not faults(subjects_since(FIRST))


def test_the_rule_for_subjects_notices_what_is_planted() -> None:
    assert not faults(["lora: support several engines, ranks, experts and GPUs"])
    assert faults(["A test's name says what is so"])
    assert faults(["docs: " + "x" * 70])
    assert faults(["docs:"])
