"""`tokenyard` with an engine process that cannot live, and little patience. Only tests run it."""

import sys

from engine.processes import engine_processes as lives
from engine.processes import supervisor
from server.command.cli import main

if __name__ == "__main__":
    lives._FIRST_BACK_OFF_S = 0.05
    supervisor._child_arguments = lambda directory: ["-c", "import os, signal; os.kill(os.getpid(), 9)"]
    sys.exit(main(sys.argv[1:]))
