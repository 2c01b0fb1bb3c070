"""The kernels' library is built once, into a place that only its owner writes."""

import os

import pytest
import torch

from worker.cpu import kernel_build as build
from worker.cpu.cpu_kernel_choice import foresee_kernels
from worker.cpu.kernel_build import CannotBuild, build_library, find_library
from worker.devices.device import open_device
from worker.doctor_findings import Finding, Verdict
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Writes what it was asked for, whatever that is."""
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho built > "$2"\n')
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    return script


def test_it_is_found_once_it_was_built(cache, compiler):
    assert find_library() is None
    path = build_library()
    assert path.read_text() == "built\n"
    assert find_library() == path
    assert [found.name for found in path.parent.iterdir()] == [path.name], "nothing else is left"


def test_one_that_others_can_write_is_not_loaded(cache, compiler):
    build_library().chmod(0o722)
    assert find_library() is None


def test_a_compiler_that_fails_is_quoted(cache, compiler):
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: what is this' >&2\nexit 1\n")
    with pytest.raises(CannotBuild, match="what is this"):
        build_library()
    assert find_library() is None


def test_no_compiler_at_all_is_said(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(CannotBuild, match="C\\+\\+ compiler"):
        build_library()


def test_a_compiler_that_is_named_but_not_there_is_said(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CannotBuild, match="CXX is no-such-compiler"):
        build_library()


def test_a_user_without_a_home_finds_what_was_built_in_place(compiler, tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id of no entry
    monkeypatch.setattr(build, "_PACKAGE", tmp_path)
    with pytest.raises(CannotBuild, match="home"):
        find_library()
    path = build_library(tmp_path)
    assert find_library() == path


# What `tokenyard doctor` says before.


def foresee(dtype: torch.dtype = torch.float32, **options: str) -> Finding:
    config = WorkerConfig(model_path="", device="cpu", **options)
    return foresee_kernels(config, open_device(config), dtype)


def test_that_they_will_be_compiled_is_foreseen_and_nothing_is_compiled(cache, compiler):
    found = foresee()
    assert (found.verdict, found.what) == (Verdict.OK, "will be compiled at first start with compiler")
    assert find_library() is None


def test_without_a_compiler_it_is_foreseen_that_torch_computes(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    found = foresee()
    assert found.verdict is Verdict.WARNING
    assert found.what.startswith("none: there is no C++ compiler")
    assert found.fix


def test_a_cache_that_cannot_be_written_is_foreseen(compiler, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = foresee()
    assert found.verdict is Verdict.WARNING
    assert "cannot be written" in found.what


def test_a_number_format_without_kernels_is_foreseen(cache):
    found = foresee(torch.float16)
    assert found.verdict is Verdict.WARNING
    assert "--dtype" in found.fix


def test_quantization_without_kernels_is_foreseen_as_a_refusal(cache):
    with pytest.raises(StartupError, match="needs the CPU kernels"):
        foresee(cpu_kernels="off", quantization="int8")


def test_a_library_that_is_no_library_is_foreseen(cache, compiler):
    build_library()
    assert foresee().verdict is Verdict.WARNING
