"""Child processes of the API process: the command that starts them, and their end with their parent."""

import ctypes
import os
import signal
import sys
from pathlib import Path

INTERPRETER = (sys.executable, "-P")
"""With -P, an `engine` in the folder where the server is started is not imported."""

CONFIG_FILE = "config.msgpack"
"""The configuration file in the engine process's directory."""
IMPORTED_FILE = "imported"
"""A file there, once a process that has no configuration waits for one."""
SIGNAL_FOR_STACKS = signal.SIGUSR1
"""The signal on which the engine process writes the stacks of its threads to its log."""
EXIT_START_FAILED = 78
"""The engine process's exit code where starting it again would fail again."""

_PR_SET_PDEATHSIG = 1


def python_path() -> str:
    """Put the folder of our packages, installed or not, before the operator's PYTHONPATH."""
    ours = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the API process ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit(0)


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM, which may reach the whole group: the parent drains, then ends us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def describe_exit(exit_code: int) -> str:
    """Say how a process ended, of which this is the code: negative is a signal."""
    if exit_code >= 0:
        return f"ended with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = str(-exit_code)
    return f"was killed by signal {name}"
