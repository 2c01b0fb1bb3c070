"""Another server's wheels, packed for a machine without a network."""

import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from campaigns.gpu import kit, serving
from campaigns.gpu.cli import Settings
from campaigns.gpu.kit import prune
from campaigns.gpu.results import Record, read_record
from campaigns.servers.running import PeerFailed

ELF, PTX = 2, 1


def program(kind: int, arch: int, content: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(content)) + bytes(12) + struct.pack("<I", arch)
    return header.ljust(64, b"h") + content


def fat_binary(*programs: bytes) -> bytes:
    whole = b"".join(programs)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(whole)) + whole


def test_a_library_keeps_its_size_and_the_programs_that_a_hopper_gpu_runs() -> None:
    both = fat_binary(
        program(ELF, 80, b"old code"), program(ELF, 90, b"our code"), program(PTX, 90, b"ptx text")
    )
    no_elf = fat_binary(program(PTX, 80, b"ptx of 80"), program(ELF, 100, b"new code"))
    library = b"head" + both + b"between" + no_elf + b"tail"
    found = prune(library)
    assert len(found) == len(library)
    assert [word in found for word in (b"our code", b"ptx of 80", b"head", b"between", b"tail")] == [True] * 5
    assert [word in found for word in (b"old code", b"ptx text", b"new code")] == [False] * 3


def test_what_is_packed_in_parts_is_importable_where_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, folder, there = tmp_path / "wheels", tmp_path / "parts", tmp_path / "kit"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "vllm-0.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "vllm/__init__.py", "from xgrammar.structural_tag import Anything\n__version__ = '0.1'\n"
        )
        wheel.writestr("vllm/_C.abi3.so", os.urandom(3000))
        wheel.writestr("vllm/other/_C.abi3.so", os.urandom(2500))
        wheel.writestr("vllm/vllm-rs", os.urandom(3000))
        wheel.writestr("vllm-0.1.data/purelib/more.py", "")
    monkeypatch.setattr(kit, "_ALONE_BYTES", 2000)
    monkeypatch.setattr(kit, "PART_BYTES", 3500)
    assert kit.main(["pack", str(wheels), str(folder)]) == 0
    assert sorted(each.name for each in folder.iterdir()) == ["part-1", "part-2"]
    for part in folder.iterdir():  # they travel one after the other
        kit.main(["unpack", str(part), str(there)])
    assert (there / "vllm" / "_C.abi3.so").stat().st_size == 3000
    assert (there / "vllm" / "other" / "_C.abi3.so").stat().st_size == 2500
    assert not (there / "vllm" / "vllm-rs").exists()
    code = "import vllm, more; print(vllm.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(there)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "0.1", done.stderr


def test_a_peer_and_ours_are_loaded_alike_and_the_ratio_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KIT", str(Path(__file__).with_name("fake_peer.py")))
    settings = Settings(out=tmp_path, is_smoke=True)
    assert {"--no-enable-prefix-caching"} <= {*serving._ours(settings, "")(1).command}, "as vLLM's"
    monkeypatch.setattr(serving, "_ours", serving._theirs)
    serving.run(Record(tmp_path, "peer"), settings)
    assert {path.name for path in tmp_path.glob("server-*.log")} == {
        "server-peer-vLLM.log",
        "server-peer-ours.log",
    }
    both, ratios = read_record(tmp_path, "peer")["tables"]
    assert [row[:4] for row in both["rows"]] == [["vLLM", "2", "4", "0"], ["ours", "2", "4", "0"]]
    assert float(ratios["rows"][0][1]) > 0
    monkeypatch.setenv("KIT", str(tmp_path / "missing.py"))
    with pytest.raises(PeerFailed):
        serving.run(Record(tmp_path, "peer"), Settings(out=tmp_path, is_smoke=True))
    assert read_record(tmp_path, "peer")["notes"][0].startswith("vLLM: ended with status 2")
