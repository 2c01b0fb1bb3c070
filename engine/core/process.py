"""The engine process: `python -m engine.core.process DIRECTORY PARENT_PID LOG_LEVEL`.

Owns: the order of the start (parent watch, sockets, model, scheduler, loop) and the exit code.
Never: reads the server's command line; its configuration is in DIRECTORY/config.msgpack.
"""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.core.checked_worker import CheckedWorker
from engine.core.loop import BesideSteps, EngineLoop, Executor, WorkerBroken
from engine.core.pulse import pulse_of_steps
from engine.core.rank_group import RankGroup
from engine.core.step_trace import StepTrace
from engine.logs.lines import ProcessName
from engine.logs.setup import Logs
from engine.nodes.first_node import gather_nodes
from engine.options.engine_config import EngineConfig
from engine.process_messages import Loading, Ready, StartFailed
from engine.processes.child_process import (
    CONFIG_FILE,
    EXIT_START_FAILED,
    die_with_parent,
    leave_signals_to_parent,
)
from engine.processes.garbage import keep_what_is_loaded, only_imports
from engine.processes.process_end import (
    EXIT_UNEXPECTED,
    EXIT_WORKER_BROKEN,
    leave,
    write_stacks_on_signal,
)
from engine.processes.transport import EngineSide
from engine.ray_cluster.nodes import RayNodes
from scheduler.cache_groups import CacheGroup
from scheduler.config import DraftAdmission, DraftSupply, PrefixCaching, SchedulerConfig, SchedulerOptions
from scheduler.prefix_keys import PrefixJournal
from scheduler.scheduler import Scheduler
from worker.devices.lazy_imports import import_torch
from worker.ranks.places import make_places
from worker.worker_config import LoadProgress, ModelFacts

if TYPE_CHECKING:
    from worker.ranks.ranks import Ranks
    from worker.worker import Worker

log = logging.getLogger(__name__)

# Without a target of the operator's: a pause that a reader hardly minds. Where few tokens are computed at the
# best rate already, shorter ones cost prompts next to nothing.
_TARGET_ITL_S = 0.2
_TARGET_ITL_OF_SMALL_CHUNKS_S = 0.07

# Instead of the shorter one while few are there: a prompt of usual length goes whole.
_UNCROWDED_ITL_S = 0.5

_SCORED_PART = 8
"""A token whose log-probability is reported costs an output layer, as much as several others."""

# As long as the dearest grammar that is accepted.
_MAX_COMPILING_S = 0.05


def main(directory: Path, parent_pid: int, log_level: int) -> int:
    """Serve until Shutdown arrives; return the exit code."""
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    write_stacks_on_signal()
    config = msgspec.msgpack.decode((directory / CONFIG_FILE).read_bytes(), type=EngineConfig)
    with Logs(config.log_format, level=log_level, process=ProcessName.ENGINE):
        mailbox = EngineSide(directory)
        try:
            return _serve(config, mailbox, directory)
        except Exception:
            log.critical("the engine process ends: nobody expected this", exc_info=True)
            return EXIT_UNEXPECTED
        finally:
            mailbox.close()


def _serve(config: EngineConfig, mailbox: EngineSide, directory: Path) -> int:
    started_s = time.monotonic()
    mailbox.send(Loading(LoadProgress(stage="starting", done_bytes=0, total_bytes=0, elapsed_s=0.0)))
    placed = None if config.ray is None else RayNodes(directory)
    # Not at the top: importing torch takes a second, and the first message should leave before.
    with only_imports():
        import_torch(config.worker.device)
        from worker.worker import Worker as _  # noqa: F401 - loaded for _open_worker
        from worker.worker_errors import StartupError

    try:
        worker, group, ranks = _open_worker(config, mailbox, directory, placed)
        facts = worker.load(lambda progress: mailbox.send(Loading(progress)))
    except StartupError as error:
        mailbox.send(StartFailed(what=error.what, fix=error.fix))
        return EXIT_START_FAILED
    log.info("loaded in %.1f s", time.monotonic() - started_s)
    keep_what_is_loaded()
    mailbox.send(Ready(facts))
    executor: Executor = worker
    beside = BesideSteps(adapters=worker.adapters, grammars=worker.grammars)
    if group is not None:
        group.lead(worker, ranks.stage)
        executor = group
        adapters, grammars = group.adapters_of_all(worker.adapters), group.grammars_of_all(worker.grammars)
        beside = BesideSteps(adapters, grammars, rank_times_s=from_now_on(ranks.times))
        if facts.num_stages > 1:
            beside = beside._replace(has_result=group.has_result)
    scheduler = _open_scheduler(config, facts, beside)
    checked = CheckedWorker(executor, vocab_size=facts.vocab_size)
    trace = _open_trace(config.trace_file)
    loop = EngineLoop(scheduler, checked, mailbox, time.monotonic, trace, beside)
    pulse = pulse_of_steps(directory)
    pulse.start()
    try:
        loop.run()
    except WorkerBroken as error:
        log.critical("%s; leaving, so that a fresh process can take over", error)
        return EXIT_WORKER_BROKEN
    finally:
        pulse.stop()
        if group is not None:
            group.close()
        worker.close()
    return 0


def _open_worker(
    config: EngineConfig, mailbox: EngineSide, directory: Path, placed: RayNodes | None
) -> tuple["Worker", RankGroup | None, "Ranks"]:
    """Start the other ranks first, if there are any: all load at the same time."""
    num_stages, num_ranks = config.worker.num_stages, config.worker.num_ranks
    if num_stages * num_ranks == 1:
        from worker.ranks.ranks import ALONE
        from worker.worker import Worker

        return Worker(config.worker), None, ALONE

    def report(progress: LoadProgress) -> None:
        mailbox.send(Loading(progress))

    switchboard = None
    if placed is not None:
        config = placed.place(config, report)
    places = make_places(num_stages, num_ranks, num_nodes=config.worker.num_nodes)
    if config.cluster is not None:
        check = (lambda: None) if placed is None else placed.check
        switchboard = gather_nodes(config, directory, report, check)
    group = RankGroup.start(directory, places, switchboard, placed)
    from engine.nodes.links import Links
    from worker.ranks.opening import open_ranks_of
    from worker.worker import Worker

    links = None if switchboard is None else Links(directory, places[0])
    ranks = open_ranks_of(config.worker, places[0], directory, links)
    return Worker(config.worker, ranks=ranks), group, ranks


def _open_scheduler(config: EngineConfig, facts: ModelFacts, beside: BesideSteps) -> Scheduler:
    options = scheduler_config(config.scheduler, facts)
    if beside.grammars is not None:
        options = replace(options, max_compiling_s=_MAX_COMPILING_S)
    scheduler = Scheduler(options)
    if config.prefix_journal is not None:
        scheduler.kv.prefix_cache.journal = PrefixJournal(config.prefix_journal)
    return scheduler


def _open_trace(path: str | None) -> StepTrace | None:
    """Open the trace; one that cannot be opened is logged and does not stop the service."""
    if path is None:
        return None
    try:
        return StepTrace(Path(path))
    except OSError as error:
        log.error("no trace of the steps: %s: %s", path, error.strerror)
        return None


def from_now_on(times: Callable[[], tuple[float, float]]) -> Callable[[], tuple[float, float]]:
    """Leave out of times what has passed already: the ranks wait for each other while they load."""
    exchanged_s, waited_s = times()

    def since() -> tuple[float, float]:
        exchange_s, wait_s = times()
        return exchange_s - exchanged_s, wait_s - waited_s

    return since


def scheduler_config(options: SchedulerOptions, facts: ModelFacts) -> SchedulerConfig:
    """The operator's options, with what the worker found; the only place where a configuration is made."""
    asked = {each.name: getattr(options, each.name) for each in fields(options)}
    max_prefill_tokens = options.max_prefill_tokens
    if max_prefill_tokens is None:
        max_prefill_tokens = facts.saturating_tokens
    decided: dict[str, Any] = {
        "max_prefill_tokens": max_prefill_tokens,
        "target_itl_s": _target_itl_s(options, facts),
        "uncrowded_itl_s": _UNCROWDED_ITL_S if _has_short_pauses(options, facts) else 0.0,
        "max_chunk_tokens": _chunk_limit(options.max_chunk_tokens, max_prefill_tokens),
        "max_scored_tokens": -(-facts.saturating_tokens // _SCORED_PART),
        "max_plans_in_flight": _plans_in_flight(options, facts),
        "draft_admission": DraftAdmission.PAYING,
        "prefix_caching": options.prefix_caching if facts.is_paged else PrefixCaching.OFF,
    }
    return SchedulerConfig(
        **(asked | decided),
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        groups=facts.groups or (CacheGroup(),),
        num_host_blocks=facts.num_host_blocks,
        copy_s_per_block=facts.copy_s_per_block,
        max_drafts=facts.max_drafts,
        draft_supply=DraftSupply.ASKED if facts.has_draft_model else DraftSupply.FREE,
        num_stages=facts.num_stages,
    )


def _target_itl_s(options: SchedulerOptions, facts: ModelFacts) -> float:
    if options.target_itl_s is not None:
        return options.target_itl_s
    return _TARGET_ITL_OF_SMALL_CHUNKS_S if _has_short_pauses(options, facts) else _TARGET_ITL_S


def _has_short_pauses(options: SchedulerOptions, facts: ModelFacts) -> bool:
    """Whether the target is ours, and the shorter one."""
    return options.target_itl_s is None and bool(facts.saturating_tokens)


def _plans_in_flight(options: SchedulerOptions, facts: ModelFacts) -> int:
    if facts.num_stages > 1:
        return facts.num_stages + 1  # one waits, so that the first stage does not
    return options.max_plans_in_flight if facts.runs_ahead else 1


def _chunk_limit(asked: int, max_prefill_tokens: int) -> int:
    """Limit of one prompt; 0 is none.

    One that leaves nothing of what all prompts get is lowered to half of that.
    """
    if 0 < max_prefill_tokens <= asked:
        return max(max_prefill_tokens // 2, 1)
    return asked


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), parent_pid=int(sys.argv[2]), log_level=int(sys.argv[3])))
