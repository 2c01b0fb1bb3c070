"""A rank beside rank 0: `python -m engine.core.rank_process DIRECTORY PARENT_PID LOG_LEVEL RANK PAGE`.

Owns: one worker with a shard of the model, which carries out the plans of rank 0, and reports nothing.
Any error ends the process, and with it the engine process: ranks that differ would compute wrong tokens.
Never: decides anything that the plans do not; and ends after its parent, however that ends.

PAGE is the descriptor of the memory that the ranks share; the configuration is in DIRECTORY.
"""

import logging
import os
import sys
import time
from pathlib import Path

import msgspec

from engine.core.process_end import EXIT_WORKER_BROKEN, leave, write_stacks_on_signal
from engine.core.rank_plans import PlansIn
from engine.logs.log_lines import ProcessName
from engine.logs.log_setup import Logs
from engine.options.engine_config import EngineConfig
from engine.process_messages import StartFailed
from engine.processes.child_process import (
    CONFIG_FILE,
    EXIT_START_FAILED,
    die_with_parent,
    leave_signals_to_parent,
)
from engine.processes.garbage import keep_what_is_loaded
from engine.processes.transport import PulseSide

log = logging.getLogger(__name__)


def main(directory: Path, parent_pid: int, log_level: int, rank: int, page: int) -> int:
    """Carry out plans until goodbye; return the exit code."""
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    write_stacks_on_signal()
    config = msgspec.msgpack.decode((directory / CONFIG_FILE).read_bytes(), type=EngineConfig)
    with Logs(config.log_format, level=log_level, process=ProcessName.RANK):
        try:
            return _follow(config, directory, rank, page)
        except Exception:
            log.critical("rank %d ends, and all others with it", rank, exc_info=True)
            return EXIT_WORKER_BROKEN


def _follow(config: EngineConfig, directory: Path, rank: int, page: int) -> int:
    started_s = time.monotonic()
    plans = PlansIn(directory, rank=rank)
    # Not at the top: importing torch takes seconds.
    from worker.ranks.shared_ranks import SharedRanks
    from worker.worker import Worker
    from worker.worker_errors import StartupError

    ranks = SharedRanks(page, rank=rank, size=config.worker.num_ranks)
    os.close(page)
    worker = Worker(config.worker, ranks=ranks)
    try:
        worker.load(lambda _progress: None)
    except StartupError as error:
        PulseSide(directory).send_last(StartFailed(what=error.what, fix=error.fix))
        return EXIT_START_FAILED
    log.info("rank %d of %d loaded in %.1f s", rank, ranks.size, time.monotonic() - started_s)
    keep_what_is_loaded()
    while (plan := plans.receive()) is not None:
        worker.launch(plan)
    plans.close()
    worker.close()
    return 0


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
