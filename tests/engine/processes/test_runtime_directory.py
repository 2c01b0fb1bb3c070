"""Directories that a killed server left are removed by the next one; those in use never are."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.processes.runtime_directory import RuntimeDirectory


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # pytest's own may have too long a path
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def test_nobody_else_can_enter_and_nothing_is_left() -> None:
    directory = RuntimeDirectory.make()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    assert not directory.path.exists()


def test_sockets_fit_however_long_the_path_of_the_temporary_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("a" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory = RuntimeDirectory.make()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory.path / "to-engine"))
    directory.remove()
    assert not list(long.iterdir())


def test_what_is_in_use_is_left_alone_and_what_was_abandoned_goes(parent: Path) -> None:
    used, abandoned = RuntimeDirectory.make(), RuntimeDirectory.make()
    (abandoned.path / "to-engine").touch()
    os.close(abandoned._lock)  # as the kernel does for a process that was killed
    third = RuntimeDirectory.make()
    assert {path.name for path in parent.iterdir()} == {used.path.name, third.path.name}
    used.remove()
    third.remove()


def test_strangers_directories_are_not_touched(parent: Path) -> None:
    without_lock = parent / "tokenyard-notes"
    without_lock.mkdir()
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (parent / "tokenyard-link").symlink_to(elsewhere)
    RuntimeDirectory.make().remove()
    assert without_lock.exists()
    assert (elsewhere / "lock").exists()
    shutil.rmtree(without_lock)
