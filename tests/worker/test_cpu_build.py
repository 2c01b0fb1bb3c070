"""The kernels' library is built once, into a place that only its owner writes."""

import pytest

from worker.cpu.build import CannotBuild, build_library, find_library


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
