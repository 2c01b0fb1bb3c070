"""The agent of one node in a process of Ray's, for one engine: the next engine has Ray place its nodes anew.

Owns: the options of the node, made of what the first node gives it.
Never: imports Ray, which only calls it (placement.py); or opens a port.
"""

import logging
import os
from collections.abc import Mapping

from engine.logs.lines import ProcessName
from engine.logs.setup import Logs
from engine.nodes.agent import NodeAgent
from engine.options.declaration import OptionError
from engine.options.engine_config import EngineConfig, resolve
from engine.options.sources import read_options
from worker.worker_errors import StartupError


def options_of(config: EngineConfig, node: int, log_level: int) -> dict[str, str]:
    """List the options of another node: all that it decides by itself, as texts."""
    assert config.cluster is not None
    worker, cluster = config.worker, config.cluster
    given = {
        "model": config.model_path,
        "checksums": worker.checksums_file,
        "num_threads": worker.num_threads,
        "pipeline_parallel_size": worker.num_stages,
        "tensor_parallel_size": worker.num_ranks,
        "nnodes": cluster.num_nodes,
        "node_rank": node,
        "master_addr": cluster.host,
        "cluster_port": cluster.port,
        "cluster_key": cluster.key,
        "log_format": config.log_format,
        "log_level": logging.getLevelName(log_level).lower(),
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def take_part(given: Mapping[str, str]) -> list[str]:
    """Run the ranks of this node for one engine; return why it is refused and what to do, or nothing."""
    try:
        config, server = resolve(read_options(dict(given), {}), environment=os.environ)
        level = logging.getLevelNamesMapping()[server.log_level.upper()]
        with Logs(config.log_format, level=level, process=ProcessName.NODE):
            refused = NodeAgent(config).take_part()
    except OptionError as error:
        return [f"{error.what}: {error.why}", error.fix]
    except StartupError as error:
        return [error.what, error.fix]
    return [] if refused is None else [refused.what, refused.fix]
