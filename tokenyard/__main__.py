"""The command `tokenyard`, also as `python -m tokenyard`.

Owns: that `server`, `engine`, `scheduler`, `worker` and `bench` are the packages of this installation,
whatever else goes by these names on PYTHONPATH.
Never: reads an option (server/command/cli.py).
Source: docs/decisions/one-installed-name.md.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def packages_folder() -> Path:
    """Return the folder that holds our packages: `inside` of a wheel, or the root of a checkout."""
    inside = _HERE / "inside"
    return inside if inside.is_dir() else _HERE.parent


def main() -> int:
    """Run the command; return its exit code."""
    # Before the first import, and first: a `server.py` of somebody else would be found instead.
    sys.path.insert(0, str(packages_folder()))
    from server.command.startup.allocator import allocate_from_heaps

    # Before the imports of the command, which would be made twice.
    allocate_from_heaps(sys.argv[1:])
    from server.command.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
