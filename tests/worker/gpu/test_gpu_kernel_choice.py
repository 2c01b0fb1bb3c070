"""The choice of kernels on a GPU, and the place of what they are compiled to."""

from pathlib import Path

import pytest
from triton import knobs

from worker.gpu import gpu_kernel_choice


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
