"""The guest's first process: what a system needs around a server, then the rounds, then the machine's end.

Owns: the mounts, loopback, and that the machine ends however the rounds end.
Never: judges (group_rounds.py).
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
import traceback
from collections.abc import Sequence

_MOUNTS = (
    ("proc", "/proc", "proc"),
    ("sysfs", "/sys", "sysfs"),
    ("devtmpfs", "/dev", "devtmpfs"),
    ("tmpfs", "/tmp", "tmpfs"),
    ("tmpfs", "/run", "tmpfs"),
)
_RB_AUTOBOOT = 0x01234567
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_SPOKEN = "/dev/ttyS0"


def mount(source: str, target: str, kind: str, data: str = "") -> None:
    """Mount a file system. Raises OSError."""
    os.makedirs(target, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), 0, data.encode() or None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _prepare() -> None:
    for source, target, kind in _MOUNTS:
        mount(source, target, kind)
    mount("tmpfs", "/dev/shm", "tmpfs")
    spoken = os.open(_SPOKEN, os.O_RDWR | os.O_NOCTTY)
    for number in (0, 1, 2):
        os.dup2(spoken, number)
    _loopback_up()
    # The two folders that the image's init put first: these sources, and what they need.
    os.environ.update(PATH="/usr/bin:/bin", HOME="/root", PYTHONPATH=os.pathsep.join(sys.path[:2]))


def _run(words: Sequence[str]) -> None:
    """Run the rounds in a child; reap it, and whatever has lost its parent, until it has ended."""
    child = os.fork()
    if child == 0:
        module = "campaigns.control_groups.group_rounds"
        os.execv("/usr/bin/python", ["python", "-u", "-m", module, *words])
    while os.wait()[0] != child:
        pass


def main(words: Sequence[str]) -> None:
    """Run as process 1; never returns."""
    try:
        _prepare()
        _run(words)
    except BaseException:  # noqa: BLE001  # the end of process 1 is a panic of the kernel, without a word of this
        traceback.print_exc(file=sys.stdout)
        print("FAULT the guest did not get to its rounds", flush=True)
    os.sync()
    ctypes.CDLL(None).reboot(_RB_AUTOBOOT)
