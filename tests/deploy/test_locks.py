"""The locks: complete, by hash, without a known fault; and the bill of materials that is made with them."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKS, SCRIPTS = ROOT / "deploy" / "locks", ROOT / "deploy" / "image"
sys.path.insert(0, str(SCRIPTS))
import audit_locks  # noqa: E402
import write_sbom  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SERVED = PROJECT["dependencies"]


def pins_of(*files: str) -> dict[str, str]:
    pins = [line for file in files for line in (LOCKS / file).read_text().splitlines() if "==" in line]
    return dict(line.split()[0].split("==") for line in pins)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (("cpu.txt", "torch-cpu.txt"), SERVED),
        (("cuda.txt",), SERVED),
        (("cpu.txt", "torch-cpu.txt", "test.txt"), [*SERVED, *EXTRAS["test"]]),
        (("docs.txt",), EXTRAS["docs"]),
    ],
)
def test_a_lock_has_every_dependency_within_its_bounds(files: tuple[str, ...], wanted: list[str]) -> None:
    pins = pins_of(*files)
    for each in map(Requirement, wanted):
        version = pins.get(audit_locks.normalized(each.name))
        assert version, f"{each.name}: run scripts/write_locks.py"
        assert each.specifier.contains(version), f"{each}: run scripts/write_locks.py"


def test_the_locks_differ_in_torch_and_what_comes_with_it_alone() -> None:
    cpu, cuda = pins_of("cpu.txt"), pins_of("cuda.txt")
    assert {name for name in cpu if cpu[name] != cuda.get(name)} == set()
    assert all(name.startswith(("torch", "triton", "nvidia-", "cuda-")) for name in cuda.keys() - cpu.keys())
    assert pins_of("torch-cpu.txt")["torch"].endswith("+cpu")


def test_the_pair_for_cuda_is_the_one_whose_triton_compiles_the_kernels_in_the_tests() -> None:
    lines = (ROOT / "constraints-cuda.txt").read_text().splitlines()
    pair = dict(line.split("==") for line in lines if "==" in line)
    cuda = pins_of("cuda.txt")
    assert pair == {name: cuda[name] for name in ("torch", "triton")}, "run scripts/write_locks.py"
    assert pins_of("test.txt")["triton"] == pair["triton"], "run scripts/write_locks.py"


def test_the_locks_are_by_hash_name_no_address_and_have_no_known_fault() -> None:
    command = [sys.executable, str(SCRIPTS / "audit_locks.py"), str(LOCKS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert not [path for path in LOCKS.iterdir() if "://" in path.read_text()]


def test_a_vulnerable_version_and_one_without_a_hash_are_named(tmp_path: Path) -> None:
    (tmp_path / "cpu.txt").write_text(f"# head\nH11==0.14.0 \\\n    --hash=sha256:{'a' * 64}\nidna==3.10\n")
    advisories = json.loads((LOCKS / "advisories.json").read_text())
    assert audit_locks.faults(tmp_path, advisories) == [
        "cpu.txt: h11==0.14.0 has CVE-2025-43859, fixed in 0.16.0",
        "cpu.txt: idna==3.10 has no hash",
    ]


def test_the_list_is_renewed_from_records_in_the_osv_format(tmp_path: Path) -> None:
    (tmp_path / "cpu.txt").write_text("h11==0.14.0\nidna==3.10\nTorch==2.10\n")
    records = tmp_path / "vulns" / "h11"
    records.mkdir(parents=True)
    ranges = "[{type: ECOSYSTEM, events: [{introduced: 2.1}, {fixed: 2.10}, {introduced: 2.9}]}]"
    torch = f"[{{package: {{ecosystem: PyPI, name: torch}}, ranges: {ranges}}}]"
    (records / "PYSEC-1.yaml").write_text(f"id: PYSEC-1\naliases: [GHSA-x, CVE-1]\naffected: {torch}")
    events = [{"introduced": "0"}, {"last_affected": "0.14.0"}]
    package = {"ecosystem": "PyPI", "name": "H11"}
    affected = [
        {
            "package": package,
            "ranges": [{"type": "GIT", "events": []}, {"type": "ECOSYSTEM", "events": events}],
        }
    ]
    record = {"id": "GHSA-2", "affected": affected}
    (records / "GHSA-2.json").write_text(json.dumps(record))
    (records / "GHSA-3.json").write_text(json.dumps({**record, "id": "GHSA-3", "withdrawn": "2026-01-01"}))
    command = [sys.executable, str(ROOT / "scripts" / "write_advisories.py"), str(tmp_path / "vulns")]
    subprocess.run([*command, "--as-of", "today", "--locks", str(tmp_path)], check=True, timeout=30)
    written = json.loads((tmp_path / "advisories.json").read_text())
    assert written["as_of"] == "today"
    assert [fault for fault in audit_locks.faults(tmp_path, written) if "hash" not in fault] == [
        "cpu.txt: h11==0.14.0 has GHSA-2, without a fixed version",
        "cpu.txt: torch==2.10 has CVE-1, without a fixed version",
    ]


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("dpkg")
    (folder / "status").write_text(
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:2.36-9+deb12u1\n"
        "Description: words\n more: words\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 1\n"
    )
    (folder / "os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    return write_sbom.bill(LOCKS, status=folder / "status", release=folder / "os-release")


def test_the_bill_of_materials_names_what_is_installed(bill: dict[str, Any]) -> None:
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    purls = [each["purl"] for each in bill["components"]]
    assert "pkg:deb/debian/libc6@1%3A2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12" in purls
    assert not [purl for purl in purls if "gone" in purl]
    assert len(set(purls)) == len(purls)
    assert any(purl.startswith("pkg:pypi/torch@") for purl in purls)


def test_a_component_has_the_hashes_that_its_lock_allows(bill: dict[str, Any]) -> None:
    hashes = audit_locks.locked_hashes(LOCKS)
    known = [each for each in bill["components"] if f"{each['name']}=={each['version']}" in hashes]
    assert known
    for each in known:
        assert "hashes" in each or "properties" in each


def test_ci_installs_from_the_locks_and_audits_them() -> None:
    lines = (ROOT / ".ci" / "run").read_text()
    assert (
        "--require-hashes -r deploy/locks/cpu.txt -r deploy/locks/test.txt -r deploy/locks/docs.txt\n"
        in lines
    )
    assert "\npython deploy/image/audit_locks.py deploy/locks\n" in lines
