"""The kernels' library is built once, into a place that only its owner writes."""

import grp
import logging
import os
import pwd
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from worker.cpu import kernel_build as build
from worker.cpu.kernel_build import CannotBuild, Untrusted, build_library, find_library, open_library
from worker.cpu.kernel_choice import foresee_kernels
from worker.cpu.native import Kernels
from worker.devices.device import open_device
from worker.doctor_findings import Finding, Verdict
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

SETS = sorted((build._SOURCES / "instruction_sets").glob("*.cpp"))


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


ZEN4 = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 avx512vbmi"


@pytest.mark.parametrize(
    ("flags", "taken"),
    [
        (ZEN4, {"avx512_bf16", "avx512_float", "avx512_expanded", "amx"}),
        (ZEN4.replace(" avx512_bf16", ""), {"avx512_vnni", "avx2"}),
        ("avx2 fma f16c avx_vnni", {"avx_vnni", "avx2"}),
        ("avx2 fma f16c", {"avx2"}),
        ("avx2 fma", None),
        (None, None),
    ],
)
def test_a_start_compiles_what_its_processor_takes(cache, compiler, monkeypatch, flags, taken):
    """All sets where none fits, or where the system does not say what there is."""
    processor, calls = cache / "cpuinfo", compiler.with_name("calls")
    if flags is not None:
        processor.write_text(f"processor: 0\nflags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr(build, "_FLAGS_OF_PROCESSOR", processor)
    compiler.write_text(compiler.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\necho "$*" >> {calls}\n'))
    path = build_library(for_this_processor=True)
    assert find_library(for_this_processor=True) == path
    assert find_library() == (path if taken is None else None)
    lines = [line for line in calls.read_text().splitlines() if "instruction_sets/" in line]
    compiled = {
        re.search(r"instruction_sets/(\w+)\.cpp", line)[1] for line in lines if "LEFT_OUT" not in line
    }
    assert compiled == ({"plain", *taken} if taken else {source.stem for source in SETS})


def test_a_library_of_all_sets_serves_a_start_too(cache, compiler):
    path = build_library()
    assert find_library(for_this_processor=True) == path


@pytest.mark.parametrize("has_locks", [True, False])
def test_servers_that_start_at_once_for_the_first_time_build_one_library(
    cache, compiler, monkeypatch, has_locks
):
    calls = compiler.with_name("calls")
    compiler.write_text(compiler.read_text().replace("echo built", f"echo >> {calls}; sleep 0.1; echo built"))
    if not has_locks:
        monkeypatch.setattr(build.fcntl, "flock", refuse)
    with ThreadPoolExecutor(4) as servers:
        paths = {each.result() for each in [servers.submit(build_library) for _ in range(4)]}
    (path,) = paths
    assert path.read_text() == "built\n"
    num_calls = len(list(build._SOURCES.rglob("*.cpp"))) + 1
    if has_locks:
        assert len(calls.read_text()) == num_calls, "and build it once"
    assert [found.name for found in path.parent.iterdir()] == [path.name], "nothing else is left"


def refuse(*_):
    raise OSError("no locks available")


def test_one_that_others_can_write_is_not_loaded(cache, compiler):
    build_library().chmod(0o722)
    assert find_library() is None


def test_a_compiler_that_fails_is_quoted(cache, compiler):
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: what is this' >&2\nexit 1\n")
    with pytest.raises(CannotBuild, match="what is this"):
        build_library()
    assert find_library() is None


def test_a_server_waits_for_a_compiler_so_long_and_an_image_as_long_as_it_takes(
    cache, compiler, monkeypatch, tmp_path
):
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.05)
    compiler.write_text(compiler.read_text().replace("\n", "\nsleep 0.2\n", 1))
    with pytest.raises(CannotBuild, match=r"took more than 0\.05 s"):
        build_library()
    assert build_library(tmp_path).read_text() == "built\n"


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


def test_a_folder_that_others_can_write_is_neither_compiled_into_nor_loaded_from(cache, compiler):
    folder = build_library().parent
    folder.chmod(0o777)
    assert find_library() is None
    with pytest.raises(CannotBuild, match="others may write there"):
        build_library()
    assert [found.suffix for found in folder.iterdir()] == [".so"], "nothing was compiled"
    folder.chmod(0o700)
    assert find_library() is not None


def test_a_folder_of_another_user_or_a_link_is_not_taken_over(cache, compiler, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (cache / "tokenyard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotBuild, match="is no folder"):
        build_library()
    (cache / "tokenyard").unlink()
    build_library()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    if os.stat(cache).st_uid != 0:
        assert find_library() is None
        with pytest.raises(CannotBuild, match="belongs to another user"):
            build_library()


@pytest.mark.parametrize(("mode", "is_safe"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_the_folder_above_may_be_shared_only_where_nobody_renames_what_is_anothers(
    cache, compiler, mode, is_safe
):
    cache.chmod(mode)
    if is_safe:
        assert build_library() == find_library()
    else:
        with pytest.raises(CannotBuild, match="others may write there"):
            build_library()


def test_a_library_is_opened_once_and_what_was_checked_is_what_is_loaded(cache, compiler):
    path = build_library()
    opened = open_library(path)
    assert opened == open_library(path), "the loader knows it by one name"
    path.with_name("other").write_text("planted")
    path.with_name("other").replace(path)
    assert opened.read_text() == "built\n"
    path.unlink()
    assert opened.read_text() == "built\n"


def test_no_two_libraries_have_one_name(cache, compiler):
    path = build_library()
    first = open_library(path)
    path.unlink()
    assert open_library(build_library()) != first


def test_kernels_load_no_library_that_fails_the_checks(cache, compiler):
    path = build_library()
    path.chmod(0o777)
    with pytest.raises(OSError, match="may be written by others"):
        Kernels(path, 1)


def test_a_link_and_a_pipe_are_not_opened_for_a_library(cache, compiler):
    path = build_library()
    path.replace(cache / "elsewhere")
    path.symlink_to(cache / "elsewhere")
    assert find_library() is None
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Untrusted, match="is no file"):
        open_library(path)


def test_why_a_library_is_not_loaded_is_logged(cache, compiler, caplog):
    assert find_library() is None
    assert not caplog.records, "there was none"
    path = build_library()
    cache.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert find_library() is None
    assert [each.getMessage() for each in caplog.records] == [
        f"{path} is not loaded: {cache}: others may write there"
    ]


@pytest.mark.parametrize("mode", [0o777, 0o733, 0o703])
def test_every_folder_up_to_the_root_counts(tmp_path, compiler, monkeypatch, mode):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open/home/cache"))
    path = build_library()
    assert find_library() == path
    (tmp_path / "open").chmod(mode)
    assert find_library() is None
    with pytest.raises(CannotBuild, match="open: others may write there"):
        build_library()
    found = foresee()
    assert (found.verdict, "others may write there" in found.what) == (Verdict.WARNING, True)
    (tmp_path / "open").chmod(mode | 0o1000)
    assert find_library() == path, "nobody renames there what is another's"


def test_a_folder_of_another_user_anywhere_above_counts(tmp_path, compiler, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "theirs/home/cache"))
    build_library()
    os.chown(tmp_path / "theirs", 12345, -1)
    assert find_library() is None
    with pytest.raises(CannotBuild, match="theirs: belongs to another user"):
        build_library()


@pytest.mark.parametrize(
    ("name", "members", "of_primary_group", "is_safe"),
    [
        ("me", [], [], True),
        ("me", ["me"], [], True),
        ("me", ["me", "mallory"], [], False),
        ("me", [], ["mallory"], False),
        ("staff", [], [], False),
    ],
)
def test_a_group_may_write_above_where_it_is_the_users_own(
    cache, compiler, monkeypatch, name, members, of_primary_group, is_safe
):
    """Many systems give each user a group of the same name, and new folders are open to it."""
    path = build_library()
    cache.chmod(0o775)
    found = cache.stat()
    user = pwd.struct_passwd(("me", "x", found.st_uid, found.st_gid, "", "", ""))
    others = [
        pwd.struct_passwd((each, "x", found.st_uid + 1, found.st_gid, "", "", ""))
        for each in of_primary_group
    ]
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(pwd, "getpwall", lambda: [user, *others])
    asked = build._users_of_primary_group.__wrapped__
    monkeypatch.setattr(build, "_users_of_primary_group", asked)  # without what others asked before
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, members)))
    assert find_library() == (path if is_safe else None)
    if not is_safe:
        with pytest.raises(CannotBuild, match="others may write there"):
            build_library()


def test_a_list_of_access_rights_hides_others_behind_the_group(cache, compiler, monkeypatch):
    path = build_library()
    cache.chmod(0o775)
    monkeypatch.setattr(build, "_is_own_group", lambda _: True)
    assert find_library() == path
    monkeypatch.setattr(os, "listxattr", lambda _: ["system.posix_acl_access"])
    assert find_library() is None


def test_a_home_behind_a_link_is_as_good_as_the_folder_itself(tmp_path, compiler, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home/cache"))
    path = build_library()
    assert find_library() == path
    assert open_library(path).read_text() == "built\n"
    (tmp_path / "disk").chmod(0o777)
    assert find_library() is None


def test_what_was_built_in_place_is_held_to_the_same_rule(compiler, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "package").mkdir(mode=0o755)
    monkeypatch.setattr(build, "_PACKAGE", tmp_path / "package")
    in_place = build_library(tmp_path / "package")
    assert find_library() == in_place
    (tmp_path / "package").chmod(0o777)
    assert find_library() is None
    assert "package: others may write there" in caplog.text
    assert find_library() is None
    cached = build_library()
    assert cached != in_place
    assert find_library() == cached


def test_the_folders_that_it_makes_are_private(tmp_path, compiler, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home/cache"))
    before = os.umask(0)
    try:
        path = build_library()
    finally:
        os.umask(before)
    assert {each.stat().st_mode & 0o777 for each in list(path.parents)[:3]} == {0o700}
    assert find_library() == path
