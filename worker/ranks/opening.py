"""The choice of the exchange between ranks: memory of the host, links of other nodes, or GPUs."""

from pathlib import Path

from worker.ranks.device_ranks import DeviceRanks
from worker.ranks.places import RankPlace
from worker.ranks.ranks import Ranks
from worker.ranks.shared_ranks import NodeLinks, open_ranks
from worker.worker_config import WorkerConfig


def open_ranks_of(
    config: WorkerConfig, place: RankPlace, directory: Path, links: NodeLinks | None = None
) -> Ranks:
    """Open the exchange of one rank; `directory` is that of its engine alone."""
    if config.device.startswith("cuda"):
        return DeviceRanks(directory, config, place, links)
    return open_ranks(place, links)
