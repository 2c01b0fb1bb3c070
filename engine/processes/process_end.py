"""The end of an engine process or of a rank, and the stacks that it writes when it stands still.

Owns: the exit codes, and an exit that waits for nothing.
"""

import faulthandler
import logging
import os
import signal
import sys
from typing import NoReturn

from engine.processes.child_process import SIGNAL_FOR_STACKS

EXIT_WORKER_BROKEN = 70
EXIT_UNEXPECTED = 1


def write_stacks_on_signal() -> None:
    """Write all threads' stacks to stderr from the signal handler, even if a thread is stuck in C."""
    faulthandler.enable()  # the same at a segmentation fault
    faulthandler.register(SIGNAL_FOR_STACKS, all_threads=True, chain=False)


def report_signals_for_stacks() -> int:
    """Write stacks as above, and then a byte for each signal; return where to read it.

    Both are done by handlers in C, which a thread that is stuck there does not keep from running.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    faulthandler.unregister(SIGNAL_FOR_STACKS)  # it would keep its place before the next one
    signal.signal(SIGNAL_FOR_STACKS, lambda _signal, _frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    faulthandler.register(SIGNAL_FOR_STACKS, all_threads=True, chain=True)
    return reader


def leave(exit_code: int) -> NoReturn:
    """Exit at once, with everything closed: freeing modules and model one by one takes seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
