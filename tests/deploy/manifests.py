"""Kubernetes objects, from files or built by kustomize, and whether each is what its kind allows.

Owns: reading, building with whatever kustomize is installed, schemas by kind.
Never: applies a patch itself: without kustomize only the files are looked at.
"""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from tests.deploy.crd_schemas import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
KUSTOMIZE: list[str] | None = next(
    (
        [found, *rest]
        for tool, rest in (("kustomize", ["build"]), ("kubectl", ["kustomize"]))
        if (found := shutil.which(tool))
    ),
    None,
)
KUBERNETES_VERSIONS = ("1.30", "1.34")
"""An old one that is still about, and a recent one."""


def read_objects(text: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(text) if item is not None]


def read_file(path: Path) -> list[dict[str, Any]]:
    return read_objects(path.read_text(encoding="utf-8"))


@cache
def _build(folder: Path) -> str:
    assert KUSTOMIZE is not None
    return subprocess.run(
        [*KUSTOMIZE, str(folder)], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def build(folder: Path) -> list[dict[str, Any]]:
    """Render an overlay as kustomize does."""
    return read_objects(_build(folder))


def the_only(objects: list[dict[str, Any]], kind: str, name: str = "tokenyard") -> dict[str, Any]:
    (found,) = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def check(item: dict[str, Any], version: str) -> None:
    """Raises the validator's error; for a custom kind without a schema here too."""
    if item["kind"] in SCHEMAS:
        Draft202012Validator(SCHEMAS[item["kind"]]).validate(item)
    else:
        kubernetes_validate.validate(item, version, strict=True)
