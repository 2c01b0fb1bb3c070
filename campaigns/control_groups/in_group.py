"""A process that enters a control group and then is another, or holds memory there: run by its path.

    python in_group.py FILE COMMAND...
    python in_group.py FILE hold MIB

FILE is the group's cgroup.procs. Of our packages it imports none, since what it imports is counted in the
group. Holding, it says a line when it has the memory, and ends with its standard input.
"""

import os
import sys


def hold(num_mib: int) -> None:
    """Write to so much memory, and keep it."""
    kept = bytearray(b"1") * (num_mib << 20)
    print(len(kept), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    file, *words = sys.argv[1:]
    with open(file, "w", encoding="ascii") as procs:
        procs.write("0")
    if words[0] == "hold":
        hold(int(words[1]))
    else:
        os.execv(words[0], words)
