"""A checkpoint that cannot be served: told at once, once, before the engine process begins."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT


@pytest.mark.parametrize(
    ("harm", "words", "part"),
    [
        ("config", (), "config.json"),
        ("weights", (), "model.safetensors"),
        ("", ("--max-model-len", "100000"), "context window of"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_told_in_one_line(
    tiny_model: Path, tmp_path: Path, harm, words, part
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    if harm == "config":
        (folder / "config.json").write_text("{")
    elif harm == "weights":
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    else:
        content = json.loads((folder / "config.json").read_text())
        content["rope_parameters"] = content["rope_scaling"] = None
        (folder / "config.json").write_text(json.dumps(content))
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", str(folder), "--port", "0", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78
    lines = [line for line in done.stderr.splitlines() if part in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("tokenyard: ")
    assert "engine" not in done.stderr, "no engine process was started"
