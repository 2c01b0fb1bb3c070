"""The layout of a wheel: our packages lie inside `tokenyard`, since their own names are everybody's.

Its description is the README without links to files: a wheel has none of them, and a page that shows it would
lead nowhere.

Owns: where each package is installed, and the description. An editable install leaves them where they are.
Never: any other fact about the project (pyproject.toml).
Source: docs/decisions/one-installed-name.md.
"""

import re
import sys
import tempfile
from pathlib import Path

from setuptools import find_packages, setup

_LOCAL = r"\((?!https?:|#)[^)]*\)"


def without_local_links(text: str) -> str:
    """Leave pictures out, and of links to files their words."""
    text = re.sub(rf"!\[[^\]]*\]{_LOCAL}\n*", "", text)
    return re.sub(rf"\[([^\]]*)\]{_LOCAL}", r"\1", text)


description = {
    "long_description": without_local_links(
        Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    ),
    "long_description_content_type": "text/markdown",
}
INSIDE = ("server", "engine", "scheduler", "worker", "bench")

found = find_packages(include=[pattern for name in INSIDE for pattern in (name, f"{name}.*")])
if "editable_wheel" in sys.argv:
    setup(packages=["tokenyard", *found], **description)
else:
    # A fresh folder: modules that an earlier build left in build/ would be packed with the rest.
    with tempfile.TemporaryDirectory() as folder:
        setup(
            packages=["tokenyard", *(f"tokenyard.inside.{name}" for name in found)],
            package_dir={f"tokenyard.inside.{name}": name for name in INSIDE},
            options={"build": {"build_base": folder}},
            **description,
        )
