"""Compare the locks with a list of known vulnerabilities that is kept beside them: no network is needed.

    python audit_locks.py FOLDER_OF_LOCKS

Exit status 1 if a lock has a version that the list calls vulnerable, or no hash.

Owns: the reading of locks and of the list, `advisories.json` beside them.
Never: knows of what was published after the date of the list. Renew it where there is a network.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def normalized(name: str) -> str:
    """Name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_hashes(folder: Path) -> dict[str, list[str]]:
    """Hashes by `name==version`, of all locks in a folder."""
    found: dict[str, list[str]] = {}
    for _, pin, hashes in _entries(folder):
        found.setdefault(pin, []).extend(each for each in hashes if each not in found.get(pin, []))
    return found


def _entries(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """File, `name==version` and hashes of every entry."""
    for path in sorted(folder.glob("*.txt")):
        for entry in re.split(r"\n(?=[\w#])", path.read_text(encoding="utf-8")):
            found = _PIN.match(entry)
            if found:
                yield path.name, f"{normalized(found[1])}=={found[2]}", _HASH.findall(entry)


def faults(folder: Path, advisories: dict[str, Any]) -> list[str]:
    """List what is wrong with the locks, one line each."""
    found = []
    for file, pin, hashes in _entries(folder):
        if not hashes:
            found.append(f"{file}: {pin} has no hash")
        name, _, version = pin.partition("==")
        for advisory in advisories["advisories"]:
            if advisory["package"] == name and _is_within(version, advisory):
                end = f"fixed in {advisory['fixed']}" if advisory.get("fixed") else "without a fixed version"
                found.append(f"{file}: {pin} has {advisory['id']}, {end}")
    return found


def _is_within(version: str, advisory: dict[str, str]) -> bool:
    """Whether a version is vulnerable: the ends are as in an OSV record, `fixed` empty if there is none."""
    if _key(version) < _key(advisory.get("introduced", "0")):
        return False
    if last := advisory.get("last_affected"):
        return _key(version) <= _key(last)
    return not advisory["fixed"] or _key(version) < _key(advisory["fixed"])


def _key(version: str) -> tuple[int, ...]:
    """Compare releases by their numbers; a local part or a suffix does not count."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    advisories = json.loads((folder / "advisories.json").read_text(encoding="utf-8"))
    found = faults(folder, advisories)
    num_packages = len(locked_hashes(folder))
    print(
        f"{num_packages} packages against {len(advisories['advisories'])} advisories of {advisories['as_of']}"
    )
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
