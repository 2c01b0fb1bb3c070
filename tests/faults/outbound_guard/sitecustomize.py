"""Imported by every Python process of a test before anything else: nobody leaves this machine unseen.

Owns: the audit hook that writes down each attempt to reach another machine, or to look up its name, and
refuses it. Found by way of PYTHONPATH, so that every child process has it too.
Never: sees what native code does without Python; test_outbound.py asks the kernel about that where it can.
Source: the audit events that CPython's `socket` documents.
"""

import ipaddress
import os
import sys
import traceback
from typing import Any

_LOG = os.environ["OUTBOUND_LOG"]
_SENDING = {"socket.connect", "socket.sendto", "socket.sendmsg"}
_LOOKING_UP = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo"}


def _write(line: str) -> None:
    with open(_LOG, "a", encoding="utf-8") as stream:
        stream.write(f"{line}\n")


def _is_here(host: Any) -> bool:
    """A name or address of this machine; None is what a listener binds."""
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if host in (None, "", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _SENDING:
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a path: a socket of this machine
    elif event in _LOOKING_UP:
        host = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
    else:
        return
    if not _is_here(host):
        _write(f"OUTBOUND {event} {host!r} from:\n{''.join(traceback.format_stack(limit=12))}")
        raise PermissionError(f"{event} {host!r}: no test may reach another machine")


_write(f"guarded {' '.join(sys.orig_argv)}")
sys.addaudithook(_watch)
