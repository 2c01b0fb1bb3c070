"""The layout of a wheel: our packages lie inside `tokenyard`, since their own names are everybody's.

Owns: where each package is installed. An editable install leaves them where they are.
Never: any other fact about the project (pyproject.toml).
Source: docs/decisions/0033-one-installed-name.md.
"""

import sys
import tempfile

from setuptools import find_packages, setup

INSIDE = ("server", "engine", "scheduler", "worker", "bench")

found = find_packages(include=[pattern for name in INSIDE for pattern in (name, f"{name}.*")])
if "editable_wheel" in sys.argv:
    setup(packages=["tokenyard", *found])
else:
    # A fresh folder: modules that an earlier build left in build/ would be packed with the rest.
    with tempfile.TemporaryDirectory() as folder:
        setup(
            packages=["tokenyard", *(f"tokenyard.inside.{name}" for name in found)],
            package_dir={f"tokenyard.inside.{name}": name for name in INSIDE},
            options={"build": {"build_base": folder}},
        )
