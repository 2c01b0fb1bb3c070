"""One of the ranks above 0: `python -m engine.core.rank_process DIRECTORY PARENT_PID LOG_LEVEL PLACE`.

Owns: one worker with a part of the model, which carries out the plans of rank 0. Results are reported by one
rank of the last stage, if there are several stages, and by no other.
Any error ends the process, and with it the engine process: ranks that differ would compute wrong tokens.
Never: decides anything that the plans do not; and ends after its parent, however that ends.

PLACE is a RankPlace as JSON; the configuration is in DIRECTORY.
"""

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.core.between_steps import GrammarsOfRank, change_adapters
from engine.core.pulse import pulse_of_steps
from engine.core.worker_steps import ReportedSteps, StageSteps
from engine.logs.lines import ProcessName
from engine.logs.setup import Logs
from engine.nodes.rank_plans import AdapterOrder, GrammarOrder, Order, PlansIn, ResultsOut, StageResult
from engine.options.engine_config import EngineConfig
from engine.process_messages import StartFailed
from engine.processes.child_process import (
    CONFIG_FILE,
    EXIT_START_FAILED,
    die_with_parent,
    leave_signals_to_parent,
)
from engine.processes.garbage import keep_what_is_loaded, only_imports
from engine.processes.process_end import EXIT_WORKER_BROKEN, leave, write_stacks_on_signal
from engine.processes.transport import PulseSide
from worker.devices.lazy_imports import import_torch
from worker.ranks.places import RankPlace

if TYPE_CHECKING:
    from engine.nodes.links import Links
    from worker.ranks.stage import Stage
    from worker.worker import Worker

log = logging.getLogger(__name__)

_REPORT_GRAMMARS_EVERY_S = 0.001
"""While there are no steps."""


def main(directory: Path, parent_pid: int, log_level: int, place: RankPlace) -> int:
    """Carry out plans until goodbye; return the exit code."""
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    write_stacks_on_signal()
    config = msgspec.msgpack.decode((directory / CONFIG_FILE).read_bytes(), type=EngineConfig)
    with Logs(config.log_format, level=log_level, process=ProcessName.RANK):
        try:
            return _follow(config, directory, place)
        except Exception:
            log.critical("rank %d ends, and all others with it", place.rank, exc_info=True)
            return EXIT_WORKER_BROKEN


def _follow(config: EngineConfig, directory: Path, place: RankPlace) -> int:
    started_s = time.monotonic()
    # Not at the top: importing torch takes a second.
    with only_imports():
        import_torch(config.worker.device)
        from engine.nodes.links import Links
        from worker.ranks.opening import open_ranks_of
        from worker.worker import Worker
        from worker.worker_errors import StartupError

    links = Links(directory, place) if place.is_linked else None
    plans = links or PlansIn(directory, rank=place.rank)
    ranks = open_ranks_of(config.worker, place, directory, links)
    worker = Worker(config.worker, ranks=ranks)
    try:
        facts = worker.load(lambda _progress: None)
    except StartupError as error:
        PulseSide(directory).send_last(StartFailed(what=error.what, fix=error.fix))
        return EXIT_START_FAILED
    log.info("rank %d loaded in %.1f s", place.rank, time.monotonic() - started_s)
    keep_what_is_loaded()
    if place.num_stages > 1:
        # Rank 0 may wait while a later stage computes.
        pulse_of_steps(directory).start()
    if place.is_reporting:
        _report(plans, worker, links or ResultsOut(directory), runs_ahead=facts.runs_ahead)
    else:
        _carry_out(plans, worker, ranks.stage)
    plans.close()
    worker.close()
    return 0


def _report(
    plans: "PlansIn | Links", worker: "Worker", results: "ResultsOut | Links", *, runs_ahead: bool
) -> None:
    """Compute all steps until goodbye, and report their results."""
    steps = ReportedSteps(
        worker, lambda output, token_ids: results.send(StageResult(output, token_ids)), runs_ahead=runs_ahead
    )
    assert worker.grammars is not None, "it samples"
    grammars = GrammarsOfRank(worker.grammars, results.send)
    while (step := _next_order(plans, grammars)) is not None:
        if isinstance(step, AdapterOrder):
            change_adapters(worker.adapters, step)
        elif isinstance(step, GrammarOrder):
            grammars.carry_out(step)
        else:
            steps.launch(step.plan)
        steps.report(plans.has_any)


def _carry_out(plans: "PlansIn | Links", worker: "Worker", stage: "Stage") -> None:
    steps = StageSteps(worker, stage)
    while (step := plans.receive()) is not None:
        if isinstance(step, AdapterOrder):
            change_adapters(worker.adapters, step)
            continue
        if isinstance(step, GrammarOrder):
            continue
        for token_ids in step.sampled:
            steps.learn(token_ids)
        steps.launch(step.plan)


def _next_order(plans: "PlansIn | Links", grammars: GrammarsOfRank) -> Order | None:
    """Wait for an order; report grammars as soon as they are compiled."""
    while grammars.is_busy:
        grammars.report()
        if plans.has_any(_REPORT_GRAMMARS_EVERY_S):
            break
    return plans.receive()


def read_place(argument: str) -> RankPlace:
    return msgspec.json.decode(argument, type=RankPlace)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), read_place(sys.argv[4])))
