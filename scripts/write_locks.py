"""Write the locks in deploy/locks: every package that is installed, its version and the hashes of its files.

    python scripts/write_locks.py [--find-links FOLDER]

Needs `uv` (pip install uv), and an index with PyTorch's CPU build: give it with --find-links, or UV_INDEX.

Owns: which lock holds what. One resolution gives all versions, so that the image for a CPU, the one for CUDA
and the tests have the same ones but for torch and what comes with it.
Never: installs, or writes where a package came from: a hash says more.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
PYTHON = "3.11"
_TORCHS_OWN = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
_HEAD = "# Written by scripts/write_locks.py: {}.\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--find-links", default="", metavar="FOLDER")
    parser.add_argument("--uv", default="uv", metavar="COMMAND")
    options = parser.parse_args(arguments)
    links = ("--find-links", options.find_links) if options.find_links else ()
    uv = (options.uv, "pip", "compile", "--quiet", *links)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    served = [*project["dependencies"], *extras["images"]]  # an image without Pillow would read no pictures
    cpu_torch, cuda_pair = cpu_build_of_torch(), pins_of("constraints-cuda.txt")
    # Kernels are compiled in the tests by the Triton of the image for CUDA.
    tested = [*served, *extras["test"], cpu_torch, *(pin for pin in cuda_pair if pin.startswith("triton=="))]

    cpu_all = resolve(uv, tested, like=())
    same = [line for line in versions(cpu_all) if not _TORCHS_OWN.match(line)]
    cpu = resolve(uv, [*served, cpu_torch], like=same)
    documented = resolve(uv, extras["docs"], like=[line for line in versions(cpu_all) if "+" not in line])
    names = {line.partition("==")[0] for line in versions(cpu)}
    tested_names = {line.partition("==")[0] for line in versions(cpu_all)}
    cuda = resolve(uv, [*served, *cuda_pair], like=same)
    torch = [entry for entry in cpu if entry.startswith("torch==")]
    LOCKS.mkdir(exist_ok=True)
    for name, about, entries in (
        ("torch-cpu", f"PyTorch's CPU build for CPython {PYTHON}", torch),
        ("cpu", "all else that the image for a CPU has", [entry for entry in cpu if entry not in torch]),
        ("cuda", "all that the image for CUDA has", cuda),
        (
            "test",
            "what the tests have beside cpu.txt and torch-cpu.txt",
            [entry for entry in cpu_all if entry.partition("==")[0] not in names],
        ),
        (
            "docs",
            "what building the documentation has beside all these",
            [entry for entry in documented if entry.partition("==")[0] not in tested_names],
        ),
    ):
        (LOCKS / f"{name}.txt").write_text(_HEAD.format(about) + "\n".join(entries) + "\n", encoding="utf-8")
    return 0


def cpu_build_of_torch() -> str:
    """Release of constraints-cpu.txt as a CPU build."""
    (release,) = pins_of("constraints-cpu.txt")
    return f"{release}+cpu"


def pins_of(file: str) -> list[str]:
    """Releases that a file of constraints names."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "==" in line]


def resolve(uv: Iterable[str], wanted: Iterable[str], *, like: Iterable[str]) -> list[str]:
    """Resolve for Linux; return `name==version` and its hashes, one text for each package, by name."""
    command = [*uv, "-", "--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--generate-hashes", "--no-header", "--no-annotate"]
    constraints = LOCKS.parent / ".locks-same.txt"
    constraints.write_text("\n".join(like), encoding="utf-8")
    try:
        found = subprocess.run(
            [*command, "--constraints", str(constraints)],
            input="\n".join(wanted), capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
    finally:
        constraints.unlink()
    if found.returncode:
        raise SystemExit(f"write_locks: {found.stderr}")
    return re.split(r"\n(?=\w)", found.stdout.strip())


def versions(entries: Iterable[str]) -> list[str]:
    return [entry.split()[0] for entry in entries]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
