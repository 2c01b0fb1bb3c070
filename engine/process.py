"""The engine process: from `python -m engine.process DIRECTORY` to its last turn.

Owns: the order of birth (parent watch, sockets, model, scheduler, loop) and the exit code.
Never: reads the command line of the server; all it needs lies in DIRECTORY/config.msgpack.
"""

import ctypes
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.loop import EngineLoop, WorkerBroken
from engine.messages import Loading, Ready, StartFailed
from engine.step_trace import StepTrace
from engine.transport import EngineSide
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from worker.config import LoadProgress, ModelFacts

log = logging.getLogger(__name__)

CONFIG_FILE = "config.msgpack"
EXIT_START_FAILED = 78
EXIT_WORKER_BROKEN = 70
_PR_SET_PDEATHSIG = 1


def main(directory: Path, parent_pid: int, log_level: int) -> int:
    """Serve until told to leave; returns the exit code."""
    _die_with_parent(parent_pid)
    # The parent decides when to leave: it drains first, also when a whole process group is signalled.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = msgspec.msgpack.decode((directory / CONFIG_FILE).read_bytes(), type=EngineConfig)
    logging.basicConfig(level=log_level, format="%(levelname)s engine %(name)s: %(message)s")
    mailbox = EngineSide(directory)
    try:
        return _serve(config, mailbox)
    finally:
        mailbox.close()


def _serve(config: EngineConfig, mailbox: EngineSide) -> int:
    started_s = time.monotonic()
    mailbox.send(Loading(LoadProgress(stage="starting", done_bytes=0, total_bytes=0, elapsed_s=0.0)))
    # Only here: importing torch takes seconds, and the parent wants to hear from us before.
    from worker.errors import StartupError
    from worker.worker import Worker

    worker = Worker(config.worker)
    try:
        facts = worker.load(lambda progress: mailbox.send(Loading(progress)))
    except StartupError as error:
        mailbox.send(StartFailed(what=error.what, fix=error.fix))
        return EXIT_START_FAILED
    log.info("loaded in %.1f s", time.monotonic() - started_s)
    mailbox.send(Ready(facts))
    scheduler = Scheduler(scheduler_config(config, facts))
    loop = EngineLoop(scheduler, worker, mailbox, time.monotonic, _open_trace(config.trace_file))
    try:
        loop.run()
    except WorkerBroken as error:
        log.critical("%s; leaving, so that a fresh process can take over", error)
        return EXIT_WORKER_BROKEN
    finally:
        worker.close()
    return 0


def _open_trace(path: str | None) -> StepTrace | None:
    """A trace that cannot be written costs the trace, not the service."""
    if path is None:
        return None
    try:
        return StepTrace(Path(path))
    except OSError as error:
        log.error("no trace of the steps: %s: %s", path, error.strerror)
        return None


def scheduler_config(config: EngineConfig, facts: ModelFacts) -> SchedulerConfig:
    """What the operator asked, with what the worker found."""
    return replace(
        config.scheduler,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        num_host_blocks=facts.num_host_blocks,
        copy_s_per_block=facts.copy_s_per_block,
    )


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill us when the API process ends, however it ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), parent_pid=int(sys.argv[2]), log_level=int(sys.argv[3])))
