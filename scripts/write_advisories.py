"""Write deploy/locks/advisories.json: the known vulnerabilities of the packages that the locks name.

    python scripts/write_advisories.py FOLDER --as-of 2026-11-22

FOLDER has one record for each vulnerability in the OSV format, as JSON or YAML, in any folders: a checkout of
PyPA's advisory-database, or OSV's export for PyPI, unpacked. Get it where there is a network.

Owns: the choice of the records, and the list's form. Never: compares the locks (deploy/image/audit_locks.py).
Source: the OSV schema; a record names the versions in which a vulnerability begins and those that end it.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==", re.MULTILINE)


def _read_yaml(text: str) -> Any:
    """Read all values as texts: 2.10 is a version, and no number."""
    return yaml.load(text, Loader=yaml.BaseLoader)


_READERS = {".json": json.loads, ".yaml": _read_yaml, ".yml": _read_yaml}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="of the records")
    parser.add_argument("--as-of", required=True, metavar="DATE", help="of the records' newest")
    parser.add_argument("--locks", type=Path, default=LOCKS, metavar="FOLDER", help="default %(default)s")
    options = parser.parse_args(arguments)
    texts = [path.read_text(encoding="utf-8") for path in sorted(options.locks.glob("*.txt"))]
    packages = {normalized(name) for text in texts for name in _PIN.findall(text)}
    found = [each for record in records(options.folder) for each in advisories_of(record, packages)]
    if not found:
        print(f"{options.folder} has no record of a locked package in the OSV format", file=sys.stderr)
        return 1
    found.sort(key=lambda each: (each["package"], each["id"], each["introduced"]))
    lines = ",\n".join(f"  {json.dumps(each)}" for each in found)
    text = f'{{\n "as_of": {json.dumps(options.as_of)},\n "advisories": [\n{lines}\n ]\n}}\n'
    (options.locks / "advisories.json").write_text(text, encoding="utf-8")
    print(f"{len(found)} advisories of {len(packages)} locked packages")
    return 0


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """All records below a folder, but those that were taken back."""
    for path in sorted(folder.rglob("*")):
        read = _READERS.get(path.suffix)
        if read is not None and path.is_file():
            record = read(path.read_text(encoding="utf-8"))
            if isinstance(record, dict) and "affected" in record and not record.get("withdrawn"):
                yield record


def advisories_of(record: dict[str, Any], packages: set[str]) -> Iterator[dict[str, str]]:
    """Each range of versions of a locked package that the record calls vulnerable.

    `fixed` is empty where no version ends it. Ranges of commits are left out.
    """
    names = [record["id"], *record.get("aliases", ())]
    shown = next((name for name in names if name.startswith("CVE-")), names[0])
    for affected in record["affected"]:
        package = affected.get("package", {})
        name = normalized(package.get("name", ""))
        if package.get("ecosystem") != "PyPI" or name not in packages:
            continue
        for each in affected.get("ranges", ()):
            if each["type"] == "GIT":
                continue
            for introduced, end in _spans(each["events"]):
                yield {"package": name, "id": shown, "introduced": introduced, **end}


def _spans(events: Sequence[dict[str, str]]) -> Iterator[tuple[str, dict[str, str]]]:
    introduced = None
    for event in events:
        if "introduced" in event:
            if introduced is not None:
                yield introduced, {"fixed": ""}
            introduced = event["introduced"]
        elif introduced is not None and ("fixed" in event or "last_affected" in event):
            yield introduced, {name: event[name] for name in ("fixed", "last_affected") if name in event}
            introduced = None
    if introduced is not None:
        yield introduced, {"fixed": ""}


def normalized(name: str) -> str:
    """Name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
