"""A free port stays free until the server comes for which it was asked."""

import socket
import subprocess
import sys
from pathlib import Path

from campaigns.servers.free_ports import free_port, free_ports

ROOT = Path(__file__).resolve().parents[2]
ASKS = """
from campaigns.servers.free_ports import free_port
print(*(free_port() for _ in range(300)), flush=True)
input()
"""


def test_no_other_process_gets_a_port_that_one_has_got() -> None:
    asked = [sys.executable, "-c", ASKS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT}
    with subprocess.Popen(asked, **pipes) as one, subprocess.Popen(asked, **pipes) as other:
        mine = {free_port() for _ in range(300)}
        theirs, others = (set(map(int, each.stdout.readline().split())) for each in (one, other))
        for each in (one, other):
            each.communicate(b"\n")
    assert not mine & theirs
    assert not mine & others
    assert not theirs & others
    assert min(map(len, (mine, theirs, others))) > 50, "long until one is given again"


def test_ports_in_a_row_are_all_free() -> None:
    with socket.create_server(("127.0.0.2", free_ports(3) + 1)) as taken:
        port = taken.getsockname()[1]
        rows = {free_ports(3) for _ in range(100)}
    assert len(rows) > 20
    assert not rows & {port - 2, port - 1, port}
