"""The start of the worker in an engine process, with the other ranks of its model if there are any.

Owns: the order of the start: message, torch, nodes, ranks, links, weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.core.interfaces import BesideSteps, Executor
from engine.core.rank_group import RankGroup
from engine.nodes.first_node import gather_nodes
from engine.options.engine_config import EngineConfig
from engine.process_messages import Loading
from engine.processes.garbage import only_imports
from engine.processes.transport import EngineSide
from engine.ray_cluster.nodes import RayNodes
from worker.devices.lazy_imports import import_torch
from worker.ranks.places import make_places
from worker.worker_config import LoadProgress, ModelFacts

if TYPE_CHECKING:
    from worker.ranks.ranks import Ranks
    from worker.worker import Worker


class StartedWorker(NamedTuple):
    """A loaded worker, and the ranks that compute with it."""

    facts: ModelFacts
    executor: Executor
    beside: BesideSteps
    worker: "Worker"
    group: RankGroup | None

    def dismiss_nodes(self) -> None:
        """Let other nodes end too, as this engine was asked to: no other one follows it."""
        if self.group is not None:
            self.group.dismiss_nodes()

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.worker.close()


def import_worker(device: str) -> None:
    """Import torch and the worker. Not at the top: it takes a second, and the first message leaves before."""
    with only_imports():
        import_torch(device)
        from worker.worker import Worker as _  # noqa: F401 - loaded for _open_worker


def start_worker(config: EngineConfig, mailbox: EngineSide, directory: Path) -> StartedWorker:
    """Load the model, on all ranks at the same time. Raises StartupError."""

    def report(progress: LoadProgress) -> None:
        mailbox.send(Loading(progress))

    report(LoadProgress(stage="starting", done_bytes=0, total_bytes=0, elapsed_s=0.0))
    placed = None if config.ray is None else RayNodes(directory)
    import_worker(config.worker.device)
    worker, group, ranks = _open_worker(config, report, directory, placed)
    facts = worker.load(report)
    if group is None:
        return StartedWorker(facts, worker, BesideSteps(worker.adapters, worker.grammars), worker, None)
    group.lead(worker, ranks.stage)
    adapters, grammars = group.adapters_of_all(worker.adapters), group.grammars_of_all(worker.grammars)
    beside = BesideSteps(adapters, grammars, rank_times_s=from_now_on(ranks.times))
    if facts.num_stages > 1:
        beside = beside._replace(has_result=group.has_result)
    return StartedWorker(facts, group, beside, worker, group)


def _open_worker(
    config: EngineConfig,
    report: Callable[[LoadProgress], None],
    directory: Path,
    placed: RayNodes | None,
) -> tuple["Worker", RankGroup | None, "Ranks"]:
    """Start the other ranks first, if there are any."""
    num_stages, num_ranks = config.worker.num_stages, config.worker.num_ranks
    if num_stages * num_ranks == 1:
        from worker.ranks.ranks import ALONE
        from worker.worker import Worker

        return Worker(config.worker), None, ALONE

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


def from_now_on(times: Callable[[], tuple[float, float]]) -> Callable[[], tuple[float, float]]:
    """Count times from this call on: the ranks wait for each other while they load."""
    exchanged_s, waited_s = times()

    def since() -> tuple[float, float]:
        exchange_s, wait_s = times()
        return exchange_s - exchanged_s, wait_s - waited_s

    return since
