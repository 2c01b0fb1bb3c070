"""The engine process: `python -m engine.core.process DIRECTORY PARENT_PID LOG_LEVEL`.

Owns: the order of the start (parent watch, sockets, model, scheduler, loop) and the exit code.
Never: reads the server's command line; its configuration is in DIRECTORY/config.msgpack.
"""

import logging
import os
import sys
import threading
import time
from pathlib import Path

import msgspec

from engine.core.loop import EngineLoop, WorkerBroken
from engine.core.pulse import pulse_of_steps
from engine.core.scheduler_start import open_scheduler
from engine.core.step_trace import StepTrace
from engine.core.worker_start import import_worker, start_worker
from engine.core.worker_steps import CheckedWorker
from engine.logs.lines import ProcessName
from engine.logs.setup import Logs
from engine.options.engine_config import EngineConfig
from engine.process_messages import Ready, StartFailed
from engine.processes.child_process import (
    CONFIG_FILE,
    EXIT_START_FAILED,
    IMPORTED_FILE,
    die_with_parent,
    leave_signals_to_parent,
)
from engine.processes.garbage import keep_what_is_loaded
from engine.processes.process_end import (
    EXIT_UNEXPECTED,
    EXIT_WORKER_BROKEN,
    leave,
    write_stacks_on_signal,
)
from engine.processes.transport import EngineSide
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

_NICENESS = 10


def main(directory: Path, parent_pid: int, log_level: int) -> int:
    """Serve until Shutdown arrives; return the exit code."""
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    write_stacks_on_signal()
    if not (directory / CONFIG_FILE).exists():
        _wait_for_configuration(directory)
        if not (directory / CONFIG_FILE).exists():  # the server ends, or the import has failed
            return 0 if (directory / IMPORTED_FILE).exists() else EXIT_UNEXPECTED
    config = msgspec.msgpack.decode((directory / CONFIG_FILE).read_bytes(), type=EngineConfig)
    with Logs(config.log_format, level=log_level, process=ProcessName.ENGINE):
        mailbox = EngineSide(directory)
        try:
            return _serve(config, mailbox, directory)
        except Exception:
            log.critical("the engine process ends by an unexpected error", exc_info=True)
            return EXIT_UNEXPECTED
        finally:
            mailbox.close()


def _wait_for_configuration(directory: Path) -> None:
    """Import what any model on a CPU needs, then wait until stdin is closed."""

    def import_beside_others() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
        import_worker("cpu")
        (directory / IMPORTED_FILE).touch()

    # In a thread of its own, whose precedence stays low, as that of NumPy's threads, which begin at the
    # import (only the privileged may raise it). torch's begin at the first computation, at the usual one.
    importing = threading.Thread(target=import_beside_others)
    importing.start()
    importing.join()
    if (directory / IMPORTED_FILE).exists():
        sys.stdin.read()


def _serve(config: EngineConfig, mailbox: EngineSide, directory: Path) -> int:
    started_s = time.monotonic()
    try:
        started = start_worker(config, mailbox, directory)
    except StartupError as error:
        mailbox.send(StartFailed(what=error.what, fix=error.fix))
        return EXIT_START_FAILED
    log.info("loaded in %.1f s", time.monotonic() - started_s)
    keep_what_is_loaded()
    mailbox.send(Ready(started.facts))
    scheduler = open_scheduler(config, started.facts, started.beside)
    checked = CheckedWorker(started.executor, vocab_size=started.facts.vocab_size)
    trace = _open_trace(config.trace_file)
    loop = EngineLoop(scheduler, checked, mailbox, time.monotonic, trace, started.beside)
    pulse = pulse_of_steps(directory)
    pulse.start()
    try:
        loop.run()
        started.dismiss_nodes()
    except WorkerBroken as error:
        log.critical("%s; leaving, so that a fresh process can take over", error)
        return EXIT_WORKER_BROKEN
    finally:
        pulse.stop()
        started.close()
    return 0


def _open_trace(path: str | None) -> StepTrace | None:
    """Open the trace; one that cannot be opened is logged and does not stop the service."""
    if path is None:
        return None
    try:
        return StepTrace(Path(path))
    except OSError as error:
        log.error("no trace of the steps: %s: %s", path, error.strerror)
        return None


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), parent_pid=int(sys.argv[2]), log_level=int(sys.argv[3])))
