"""The start of ranks, by rank 0 of their node or by the node itself."""

import logging
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.processes import child_process
from worker.ranks.places import RankPlace

log = logging.getLogger(__name__)

RANK_MODULE = "engine.core.rank_process"


def start_rank(
    directory: Path, place: RankPlace, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a rank, in the main thread: a child ends with the thread that starts it."""
    level = str(log.getEffectiveLevel())
    return subprocess.Popen(
        [
            *child_process.INTERPRETER,
            *("-m", RANK_MODULE),
            *(str(directory), str(os.getpid()), level, msgspec.json.encode(place).decode()),
        ],
        stdin=subprocess.DEVNULL,
        pass_fds=place.descriptors,
        env=environment,
    )
