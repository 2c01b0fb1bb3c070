"""A real kernel's control groups, whose killer ends the engine process or all of the server.

    python -m campaigns.control_groups [--work FOLDER] [--kernel FILE] [--versions 2,1] [--rounds NAMES]

Makes an image of this Python, of what the server needs and of these sources; boots Debian's kernel with it
in QEMU, on an emulated processor, once for each version of control groups; and prints what each round there
saw. Control groups of this machine stay as they are. Needs qemu-system-x86_64 and mke2fs, and without
--kernel the apt sources of a Debian; no root.

Owns: the arguments, the boots, the exit status.
Never: judges (group_rounds.py).
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from campaigns.control_groups.emulator import command, fetch_kernel, lines_of
from campaigns.control_groups.guest_root import make_image, stage

_DONE = "----- done"


def show(lines: Iterable[str]) -> int:
    """Print what a guest writes, with the minutes; count faults, and one for a guest without an end."""
    began_s, num_faults, is_done = time.monotonic(), 0, False
    for line in lines:
        print(f"{(time.monotonic() - began_s) / 60:5.1f}  {line}", flush=True)
        num_faults += line.startswith("FAULT")
        is_done |= line == _DONE
    if not is_done:
        print("FAULT the guest did not come to the end of its rounds: its kernel's log says why", flush=True)
    return num_faults + (not is_done)


def make_root(work: Path) -> Path:
    """Make the image anew, since sources may have changed."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        stage(Path(folder))
        make_image(Path(folder), work / "root.img")
    return work / "root.img"


def main(argv: Sequence[str]) -> int:
    """Return 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.control_groups", allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tokenyard-control-groups")
    parser.add_argument("--kernel", type=Path, metavar="FILE", help="a vmlinuz with NVMe and ext4 built in")
    parser.add_argument("--versions", default="2,1", metavar="NUMBERS", help="default %(default)s")
    parser.add_argument("--rounds", default="", metavar="NAMES", help="doctor, killed, ...; default all")
    options = parser.parse_args(list(argv))
    if shutil.which("qemu-system-x86_64") is None:
        parser.error("qemu-system-x86_64 is missing (Debian: apt-get install qemu-system-x86)")
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    kernel = options.kernel or fetch_kernel(work)
    image, num_faults = make_root(work), 0
    print(f"{kernel.name}, {image.stat().st_size / 1e9:.1f} GB of files", flush=True)
    for version in options.versions.split(","):
        words = [version, *filter(None, options.rounds.split(","))]
        num_faults += show(lines_of(command(kernel, image, work / f"kernel-{version}.log", words)))
    print(f"{num_faults} things were not as promised")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
