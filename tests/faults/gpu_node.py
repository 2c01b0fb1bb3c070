"""An engine process, a rank or a node on a GPU that is none; each is run as the real one is.

Owns: the stand-ins of CUDA and NCCL, in each process that computes; and drafts whether they pay or not, since
times of a stand-in say nothing. With a file for what it says on stderr as one more argument it is an engine
process; with a command of the server it is a node. Only tests start it.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from engine.nodes import rank_start

NAME = "tests.faults.gpu_node"


def main() -> int:
    rank_start.RANK_MODULE = NAME
    if sys.argv[1] == "serve":
        from server.command.cli import main as serve

        return serve(sys.argv[1:])
    from engine.core import process, rank_process
    from scheduler.config import DraftAdmission
    from tests.worker.gpu.gpu_ranks import AT_ONCE, OWN, stand_ins

    directory, parent_pid, log_level = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with stand_ins(OWN, AT_ONCE):
        if sys.argv[4].startswith("{"):
            return rank_process.main(directory, parent_pid, log_level, rank_process.read_place(sys.argv[4]))
        os.dup2(os.open(sys.argv[4], os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
        process.DraftAdmission = SimpleNamespace(PAYING=DraftAdmission.ALL)  # type: ignore[assignment,misc]
        return process.main(directory, parent_pid, log_level)


if __name__ == "__main__":
    from engine.processes.process_end import leave

    leave(main())
