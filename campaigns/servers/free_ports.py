"""Ports for servers that are started with one: free now, and still when the server comes or comes again.

Owns: a block of ports for each process. The blocks lie below the ports from which Linux serves outgoing
connections and `bind` to port 0, and above those of Ray's workers.
Never: a port that is bound, or one of another process that asks here.
"""

import contextlib
import os
import socket
from functools import cache

_BLOCKS = range(20_000, 32_700, 100)


def free_port() -> int:
    return free_ports(1)


def free_ports(num: int) -> int:
    """Return the first of `num` free ports in a row; each call goes on behind the one before."""
    block = _block(os.getpid())
    for _ in range(_BLOCKS.step):
        row = block.take(num)
        if all(_is_free(port) for port in row):
            return row[0]
    raise OSError(f"of {_BLOCKS.step} ports no {num} in a row are free")


class _Block:
    """Ports of one process. The first stays bound while the process lives: the block is no other's."""

    def __init__(self, pid: int) -> None:
        for number in range(pid, pid + len(_BLOCKS)):
            start = _BLOCKS[number % len(_BLOCKS)]
            with contextlib.suppress(OSError):
                self._guard = _bound(start).detach()  # for good: nothing closes it before the end
                break
        else:
            raise OSError(f"all ports from {_BLOCKS.start} to {_BLOCKS.stop} belong to other processes")
        self._ports = range(start + 1, start + _BLOCKS.step)
        self._next = 0

    def take(self, num: int) -> range:
        assert num <= len(self._ports)
        if self._next + num > len(self._ports):
            self._next = 0
        self._next += num
        return self._ports[self._next - num : self._next]


@cache
def _block(pid: int) -> _Block:
    """The block of this process; a fork of it needs another, and has its memory."""
    return _Block(pid)


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), _bound(port):
        return True
    return False


def _bound(port: int) -> socket.socket:
    """Bind at all addresses, without SO_REUSEADDR, so that no process has the port at any. Raises OSError."""
    bound = socket.socket()
    try:
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound
