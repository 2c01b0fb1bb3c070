"""Installed names: one at the top level, and a command that no file of another project can take over."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest

from server.command.startup.allocator import is_glibc
from tests.deploy.wheels import INSIDE, ROOT, build_wheel, copy_sources, install, why_not_here
from tests.e2e.serving import running_server

pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(bool(why_not_here()), reason=f"no wheel is built here: {why_not_here()}"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    sources = copy_sources(tmp_path_factory.mktemp("sources"))
    # What an older release left where pip built it.
    left = sources / "build" / "lib" / "server"
    left.mkdir(parents=True)
    (left / "__init__.py").write_text("")
    return build_wheel(sources, folder)


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of somebody else, with modules of our names."""
    folder = tmp_path_factory.mktemp("poisoned")
    for name in INSIDE:
        (folder / f"{name}.py").write_text("raise RuntimeError('of another project')\n")
    return folder


def files_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_a_wheel_has_one_top_level_name(wheel: Path) -> None:
    names = {file.split("/")[0] for file in files_in(wheel)}
    assert {name for name in names if not name.endswith(".dist-info")} == {"tokenyard"}


def test_a_wheel_holds_every_module_and_the_files_beside_them(wheel: Path) -> None:
    packed = {file for file in files_in(wheel) if file.startswith("tokenyard/inside/")}
    folders = [ROOT / name for name in INSIDE]
    wanted = [
        *(path for folder in folders for path in folder.rglob("*.py")),
        *(path for path in (ROOT / "engine" / "demo_model").iterdir() if path.is_file()),
        *(path for path in (ROOT / "worker" / "cpu" / "csrc").rglob("*") if path.is_file()),
        *(path for path in (ROOT / "server" / "page" / "web").rglob("*") if path.is_file()),
    ]
    assert packed == {f"tokenyard/inside/{path.relative_to(ROOT).as_posix()}" for path in wanted}


def test_the_description_of_a_wheel_leads_nowhere_that_a_wheel_does_not_have(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [path] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head, _, text = archive.read(path).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert "tokenyard serve" in text
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert all(target.startswith("#") for target in targets), targets


@pytest.mark.parametrize("words", [("tokenyard",), ("python", "-m", "tokenyard")], ids=["command", "module"])
def test_the_command_runs_among_foreign_modules_of_our_names(
    commands: Path, poisoned: Path, words: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [str(commands / words[0]), *words[1:], "--version"],
        cwd=poisoned,
        env={**os.environ, "PYTHONPATH": str(poisoned)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (done.stdout, done.stderr) == (f"tokenyard {project['version']}\n", "")


def test_a_wheel_serves_its_own_model_among_foreign_modules_of_our_names(
    commands: Path, poisoned: Path, tmp_path: Path
) -> None:
    serve = (str(commands / "tokenyard"), "serve")
    variables = {"PYTHONPATH": str(poisoned)}
    with running_server(tmp_path, "--num-threads", "1", command=serve, variables=variables) as server:
        asked = {"prompt": "Once", "max_tokens": 2, "ignore_eos": True}
        reply = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 2
        assert server.engine_pid is not None
        command = Path(f"/proc/{server.engine_pid}/cmdline").read_bytes().split(b"\0")
        assert command[0] == bytes(commands / "python")
        started = Path(f"/proc/{server.process.pid}")
        assert (started / "comm").read_text() == "tokenyard\n"
        if is_glibc():  # the server was started anew, and goes by its name all the same
            assert b"PYTHONMALLOC=malloc" in (started / "environ").read_bytes().split(b"\0")


def test_the_kernels_are_built_from_a_wheel(commands: Path, poisoned: Path) -> None:
    """Built as in the Dockerfile, but for the compiler: asking for it shows that the module was found."""
    done = subprocess.run(
        [str(commands / "python"), "-P", "-m", "tokenyard.inside.worker.cpu.kernel_build", "--in-place"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(poisoned), "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "CXX is no-such-compiler, which is no program" in done.stderr


def test_a_checkout_runs_without_being_installed(poisoned: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenyard", "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(poisoned)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: tokenyard serve")
