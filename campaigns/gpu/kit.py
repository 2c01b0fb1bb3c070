"""Another server's wheels for a machine without a network: packed in parts, unpacked there.

    python -m campaigns.gpu.kit pack WHEELS FOLDER     # FOLDER/part-1, part-2, ...
    python -m campaigns.gpu.kit unpack FOLDER KIT      # what of them is there, into KIT

Owns: what is left out: code for other GPUs than Hopper's, and vLLM's libraries for other models.
Never: fetches anything, and nothing of it belongs into the repository.
"""

import argparse
import io
import lzma
import re
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

PART_BYTES = 48 << 20
"""Size of a part, at most: of the 64 MiB that travel at a time some are for the repository."""
_LEFT_OUT = re.compile(
    r"_vllm_fa2_C|_flashmla|_qutlass|third_party/(deep_gemm|fmha_sm100)|vllm-rs$"
    r"|/static/|\.(h|hpp|cuh|pyi)$|RECORD$"
)
_ALONE_BYTES = 8 << 20
"""A library from this size on is an archive of its own."""
_FATBIN = struct.pack("<I", 0xBA55ED50)
_ELF, _PTX, _HOPPER = 2, 1, 90
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 128 << 20}]
_STUB = '''"""A name for each name: grammars are not asked for."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''
_STUBS = tuple(f"xgrammar/{each}.py" for each in ("__init__", "openai_tool_call_schema", "structural_tag"))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.gpu.kit", description=__doc__.split("\n")[0])
    parser.add_argument("act", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args(argv)
    options.target.mkdir(parents=True, exist_ok=True)
    for line in (pack if options.act == "pack" else unpack)(options.source, options.target):
        print(line, flush=True)
    return 0


def pack(wheels: Path, folder: Path) -> Iterator[str]:
    """Write an archive of each wheel and of each large library, then put them into parts, largest first."""
    archives = []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as members:
            named = (name for name in members.namelist() if not name.endswith("/"))
            names = [name for name in named if not _LEFT_OUT.search(name)]
            alone = [name for name in names if members.getinfo(name).file_size >= _ALONE_BYTES]
            groups = {f"{wheel.stem}.tar.xz": [name for name in names if name not in alone]}
            groups |= {f"{_place(name).replace('/', '.')}.tar.xz": [name] for name in alone}
            for archive, of_group in groups.items():
                _write(folder / archive, {_place(name): _content(members, name) for name in of_group})
                archives.append(folder / archive)
                yield f"{archive}: {archives[-1].stat().st_size / 2**20:.1f} MiB"
    _write(folder / "stubs.tar.xz", dict.fromkeys(_STUBS, _STUB.encode()))
    parts: list[int] = []
    for archive_path in sorted([*archives, folder / "stubs.tar.xz"], key=lambda each: -each.stat().st_size):
        size = archive_path.stat().st_size
        number = next((at for at, full in enumerate(parts) if full + size <= PART_BYTES), len(parts))
        if number == len(parts):
            parts.append(0)
        parts[number] += size
        part = folder / f"part-{number + 1}"
        part.mkdir(exist_ok=True)
        archive_path.replace(part / archive_path.name)
    for number, full in enumerate(parts):
        yield f"part-{number + 1}: {full / 2**20:.1f} MiB"


def unpack(folder: Path, kit: Path) -> Iterator[str]:
    """Extract what is in a folder of parts, or in one part."""
    for path in sorted(folder.glob("**/*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(kit, filter="data")
        yield path.name


def _place(name: str) -> str:
    """Return where an installer puts a member: beside its package."""
    return re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name)


def _content(members: zipfile.ZipFile, name: str) -> bytes:
    content = members.read(name)
    return prune(content) if name.endswith(".so") and len(content) >= _ALONE_BYTES else content


def prune(library: bytes) -> bytes:
    """Zero each GPU program of a library that a Hopper GPU does not run; all else keeps its place."""
    found, at = bytearray(library), 0
    while (at := library.find(_FATBIN, at)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", library, at)
        if version != 1 or header != len(_FATBIN) + 12 or at + header + size > len(library):
            at += len(_FATBIN)
            continue
        programs = list(_programs(library, at + header, at + header + size))
        has_elf = any(kind == _ELF and arch == _HOPPER for kind, arch, _, _ in programs)
        for kind, arch, begin, end in programs:
            runs = arch == _HOPPER if kind == _ELF else kind == _PTX and not has_elf and arch <= _HOPPER
            if not runs:
                found[begin:end] = bytes(end - begin)
        at += header + size
    return bytes(found)


def _programs(library: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, architecture, begin and end of the programs of one fat binary."""
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        if not 48 <= header <= 256 or at + header + size > end + 64:
            return
        yield kind, struct.unpack_from("<I", library, at + 28)[0], at + header, at + header + size
        at += header + size


def _write(path: Path, contents: dict[str, bytes]) -> None:
    with lzma.open(path, "wb", filters=_FILTERS) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
