"""The choice of kernels on a GPU, and the place of what they are compiled to."""

import ast
from pathlib import Path

import pytest
from triton import knobs, language

from worker.gpu import kernel_choice as gpu_kernel_choice
from worker.worker_config import WorkerConfig


@pytest.mark.parametrize("asked", [{}, {"TRITON_CACHE_DIR": "elsewhere"}])
def test_compiled_kernels_are_kept_where_a_volume_can_be(
    asked: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for name, value in (asked | {"XDG_CACHE_HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    with knobs.cache.scope():
        before = knobs.cache.dir
        gpu_kernel_choice._keep_compiled_kernels()
        kept = tmp_path / "tokenyard" / "triton"
        assert knobs.cache.dir == (before if asked else str(kept))
        assert kept.exists() != bool(asked)


def test_a_cache_that_cannot_be_written_to_is_told_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with knobs.cache.scope():
        before = knobs.cache.dir
        gpu_kernel_choice._keep_compiled_kernels()
        assert knobs.cache.dir == before
    assert "not kept" in caplog.text


def test_kernels_are_written_in_no_more_of_triton_than_is_asked_for_at_start() -> None:
    folder, used = Path(gpu_kernel_choice.__file__).parent, set[str]()
    for path in folder.rglob("*.py"):
        used |= {
            node.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tl"
        }
    assert used == gpu_kernel_choice._LANGUAGE


def test_a_triton_that_lacks_something_is_named_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernel_choice.shutil, "which", lambda name: f"/usr/bin/{name}")
    config = WorkerConfig(model_path="")
    assert "triton" not in gpu_kernel_choice.obstacle(config)
    monkeypatch.delattr(language, "debug_barrier")
    monkeypatch.setattr(language, "load", lambda pointer, mask: pointer)
    told = gpu_kernel_choice.obstacle(config)
    assert "has no debug_barrier, load(cache_modifier=): the kernels need 3.6 or later" in told
