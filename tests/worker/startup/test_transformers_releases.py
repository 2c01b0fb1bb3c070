"""Families with the oldest and the newest transformers that pyproject.toml allows, beside the locked one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

pytestmark = [pytest.mark.night, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[3]
_PICKED = (
    "mixed_batch and (llama-linear or qwen3 or gemma3 or gpt_oss or deepseek_v3 or lfm2)"
    " or whole_checkpoint and (mistral3 or qwen3_vl)"
)
"""A family of each kind: all of them take as long as all other tests of this folder."""


_FILES = ("family_matrix", "families_with_pictures")


def allowed() -> tuple[str, str]:
    """The oldest release, to its second number, and the requirement."""
    found = re.search(r'"transformers>=([\d.]+),(<\d+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return f"transformers=={found[1]}.*", f"transformers>={found[1]},{found[2]}"


def pip(*words: str) -> str:
    """Output of `pip install`. Skips the test where it fails."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if made.returncode:
        pytest.skip(f"{words[-1]} cannot be installed: {made.stderr[-300:]}")
    return made.stdout


@pytest.mark.parametrize("requirement", allowed(), ids=["oldest", "newest"])
def test_families_are_served_with_this_release(requirement: str, tmp_path: Path) -> None:
    chosen = pip("--dry-run", "--ignore-installed", "--no-deps", "--report", "-", requirement)
    if json.loads(chosen)["install"][0]["metadata"]["version"] == transformers.__version__:
        pytest.skip("it is the one that is installed")
    pip("--no-compile", "--target", str(tmp_path), requirement)
    files = [Path(__file__).with_name(f"test_{name}.py") for name in _FILES]
    tried = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "-k", _PICKED, *files],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert tried.returncode == 0, tried.stdout[-3000:]
