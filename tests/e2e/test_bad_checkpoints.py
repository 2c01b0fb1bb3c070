"""A checkpoint that cannot be served: told at once, once, before the engine process begins."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT

pytestmark = pytest.mark.night


def serve(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", "serve", str(folder), "--port", "0", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("harm", "words", "part"),
    [
        ("weights", (), "model.safetensors"),
        ("deep", (), "config.json"),
        ("", ("--max-model-len", "100000"), "context window of"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_told_in_one_line(
    tiny_model: Path, tmp_path: Path, harm, words, part
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    if harm == "weights":
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    elif harm == "deep":
        (folder / "config.json").write_text("[" * 5000 + "]" * 5000)
    else:
        content = json.loads((folder / "config.json").read_text())
        content["rope_parameters"] = content["rope_scaling"] = None
        (folder / "config.json").write_text(json.dumps(content))
    done = serve(folder, *words)
    assert done.returncode == 78
    lines = [line for line in done.stderr.splitlines() if part in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("tokenyard: ")
    assert "engine" not in done.stderr, "no engine process was started"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"num_attention_heads": 0}),
        ("tokenizer.json", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA////"}}),
    ],
)
def test_values_that_no_library_takes_are_told_once_without_a_stack(
    tiny_model: Path, tmp_path: Path, name, changes
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | changes))
    done = serve(folder)
    assert done.returncode == 78, done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("tokenyard: ")]) == 1, (
        done.stderr
    )
