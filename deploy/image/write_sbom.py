"""Write a bill of materials of this environment: CycloneDX 1.6, JSON, to stdout.

    python write_sbom.py FOLDER_OF_LOCKS > sbom.cdx.json

Owns: the Python packages that are installed beside the running interpreter, with the hashes that their locks
allow, and the packages of the Debian system below them.
Never: looks anything up: what is written is what is there.
"""

import json
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from audit_locks import locked_hashes, normalized

STATUS = Path("/var/lib/dpkg/status")
RELEASE = Path("/etc/os-release")


def bill(locks: Path, *, status: Path = STATUS, release: Path = RELEASE) -> dict[str, Any]:
    """Make the document. The same environment gives the same text: it has no time and no random number."""
    components = sorted(
        [*_python_packages(locked_hashes(locks)), *_debian_packages(status, release)],
        key=lambda each: str(each["purl"]),
    )
    ours = [each for each in components if each["name"] == "tokenyard"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**ours[0], "type": "application"}} if ours else {},
        "components": [each for each in components if each not in ours],
    }


def _python_packages(hashes: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    for each in distributions():
        name, version = normalized(each.metadata["Name"]), each.version
        purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
        found: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": purl}
        found["bom-ref"] = purl
        licence = each.metadata.get("License-Expression")
        if licence:
            found["licenses"] = [{"expression": licence}]
        known = hashes.get(f"{name}=={version}", [])
        if len(known) == 1:
            found["hashes"] = [{"alg": "SHA-256", "content": known[0]}]
        elif known:
            # One of these is the file that was installed: pip refuses all others.
            found["properties"] = [{"name": "tokenyard:allowed-sha256", "value": each} for each in known]
        yield found


def _debian_packages(status: Path, release: Path) -> Iterator[dict[str, Any]]:
    if not status.exists():
        return
    facts = dict(line.split("=", 1) for line in release.read_text().splitlines() if "=" in line)
    distro = f"{facts.get('ID', 'debian')}-{facts.get('VERSION_ID', '')}".replace('"', "").rstrip("-")
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " "
        )
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            quoted = version.replace("+", "%2B").replace(":", "%3A").replace("~", "~")
            purl = f"pkg:deb/debian/{name}@{quoted}?arch={fields['Architecture']}&distro={distro}"
            yield {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


if __name__ == "__main__":
    print(json.dumps(bill(Path(sys.argv[1])), indent=1))
