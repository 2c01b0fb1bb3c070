"""How a process of ours is started by the API process, and how it ends with it.

Owns: the command, what every child inherits, and that no child outlives its parent.
Never: what a child does (process.py, grammar_process.py).
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

INTERPRETER = (sys.executable, "-P")
"""-P: a folder with an `engine` of its own, where the server is started, changes nothing."""

CONFIG_FILE = "config.msgpack"
"""The file in the engine process's directory from which it reads its configuration."""
SIGNAL_FOR_STACKS = signal.SIGUSR1
"""Makes the engine process write the stacks of its threads to its log."""
EXIT_START_FAILED = 78
"""The engine process's exit code where starting it again would fail again."""

_PR_SET_PDEATHSIG = 1


def python_path() -> str:
    """Where our own packages are, installed or not, before what the operator set."""
    ours = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill us when the API process ends, however it ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit(0)


def leave_signals_to_parent() -> None:
    """The parent decides when to leave: it drains first, also when a whole process group is signalled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
