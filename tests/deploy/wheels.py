"""The wheel of this checkout, built and installed as a user would, without a network.

Owns: a copy of the sources to build from; a virtual environment that borrows the dependencies of this one.
Never: downloads; where that would be needed it says so.
"""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSIDE = ("server", "engine", "scheduler", "worker", "bench")
_SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "tokenyard", *INSIDE)
_OLDEST_SETUPTOOLS = 77  # [build-system] in pyproject.toml


def why_not_here() -> str:
    """Return what is missing to build a wheel without a network; empty if nothing is."""
    for name in ("pip", "setuptools"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    found = version("setuptools")
    return f"setuptools {found} is too old" if int(found.split(".")[0]) < _OLDEST_SETUPTOOLS else ""


def copy_sources(folder: Path) -> Path:
    """Copy into `folder` what a wheel is made of: building leaves files beside its sources."""
    for name in _SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, folder / name)
    return folder


def build_wheel(sources: Path, folder: Path) -> Path:
    """Build the wheel of `sources` into `folder`."""
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sources))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install `wheel` into a new environment in `folder`; return the folder of its commands."""
    venv.create(folder, symlinks=True)
    commands = folder / "bin"
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    borrowed = Path(paths["purelib"]) / "borrowed.pth"
    borrowed.write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", str(commands / "python"), "install", "--no-deps", "--no-index", str(wheel))
    return commands


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
