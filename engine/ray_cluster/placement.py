"""The nodes of one engine: `python -m engine.ray_cluster.placement DIRECTORY PARENT_PID LOG_LEVEL`.

Owns: Ray's placement group, and one actor for each node but the first, which runs the node's agent. The
process ends when one of them does; and Ray frees all when the process ends, however that is.
Never: chooses a machine or carries a message of ranks: Ray does the one, the switchboard the other.
Source: Ray's placement groups, https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html.

What Ray carries between its own processes it pickles: here the code of `_Node`, a mapping of texts to it, and
a list of texts back. No other object of ours is pickled.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.logs.lines import ProcessName
from engine.logs.setup import Logs
from engine.options.engine_config import EngineConfig
from engine.process_messages import StartFailed
from engine.processes.child_process import (
    CONFIG_FILE,
    EXIT_START_FAILED,
    die_with_parent,
    leave_signals_to_parent,
)
from engine.processes.process_end import EXIT_WORKER_BROKEN, leave
from engine.processes.transport import PulseSide
from engine.ray_cluster.agent import options_of
from engine.ray_cluster.nodes import (
    Placed,
    Resources,
    divided,
    possible_nodes,
    say_placed,
    share_of,
    turns,
)
from worker.worker_errors import StartupError

log = logging.getLogger("engine.ray_cluster.placement")

_RAY_STARTS_WITHIN_S = 60.0
"""Time for a Ray that is started together with the server."""
_CPU, _GPU = "CPU", "GPU"
_NODE_ID_LABEL = "ray.io/node-id"


class _Node:
    """An actor. Ray sends its code: a process of Ray's does not find our modules before it runs."""

    def run(self, given: dict[str, str]) -> list[str]:
        from importlib import import_module

        sys = import_module("sys")
        sys.path.insert(0, str(import_module("tokenyard.__main__").packages_folder()))
        found: list[str] = import_module("engine.ray_cluster.agent").take_part(given)
        return found

    def gpus(self) -> list[str]:
        """List the GPUs that Ray has given to the part of this node."""
        from importlib import import_module

        found: list[str] = import_module("ray").get_runtime_context().get_accelerator_ids()["GPU"]
        return found


def main(directory: Path, parent_pid: int, log_level: int) -> int:
    """Place the nodes and hold them until one ends; return the exit code."""
    die_with_parent(parent_pid)
    config = msgspec.msgpack.decode((directory / CONFIG_FILE).read_bytes(), type=EngineConfig)
    with Logs(config.log_format, level=log_level, process=ProcessName.PLACEMENT), _silent_prints():
        try:
            here = _connect(config)
            group, placed = _place(config, here)
            say_placed(directory, placed)
            return _hold(divided(config, placed), group, log_level)
        except StartupError as error:
            PulseSide(directory).send_last(StartFailed(what=error.what, fix=error.fix))
            return EXIT_START_FAILED
        except Exception:
            log.critical("the placement by Ray has failed", exc_info=True)
            return EXIT_WORKER_BROKEN


@contextmanager
def _silent_prints() -> Iterator[None]:
    """Drop what Ray prints, in colours, between the lines of the log."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _connect(config: EngineConfig) -> str:
    """Join Ray as a driver; return the id of this machine's node. Raises StartupError."""
    assert config.ray is not None
    until_s = time.monotonic() + min(config.ray.timeout_s, _RAY_STARTS_WITHIN_S)
    address = os.environ.get("RAY_ADDRESS", "auto")
    fix = "make this machine a node of the cluster: `ray start --head` or `ray start --address ...`"
    if "://" in address or address == "local":
        raise StartupError(f"RAY_ADDRESS={address} is not a cluster of which this machine is a node", fix=fix)
    while not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except Exception as error:  # of many types, by Ray's version
            if time.monotonic() > until_s:
                what = " ".join(str(error).split())
                raise StartupError(f"no Ray answers on this machine ({what[:200]})", fix=fix) from error
            time.sleep(1.0)
    leave_signals_to_parent()  # Ray sets a handler of its own
    return str(ray.get_runtime_context().get_node_id())


def _place(config: EngineConfig, here: str) -> tuple[PlacementGroup, Placed]:
    """Let Ray find the nodes; this machine is the first. Raises StartupError."""
    assert config.ray is not None
    nodes = [node for node in ray.nodes() if node["Alive"]]
    sizes = {node["NodeID"]: _resources_of(node["Resources"]) for node in nodes}
    size_here = sizes.pop(here, Resources(0))
    others = list(sizes.values())
    possible = possible_nodes(config, size_here, others)
    group, num_nodes = _find(config, here, possible, _describe(size_here, others))
    (host,) = [node["NodeManagerAddress"] for node in nodes if node["NodeID"] == here]
    gpus = _gpus_here(group, share_of(config, num_nodes).taken)
    return group, Placed(num_nodes=num_nodes, host=config.ray.host or host, gpus=gpus)


def _resources_of(resources: Mapping[str, float]) -> Resources:
    return Resources(int(resources.get(_CPU, 0)), int(resources.get(_GPU, 0)))


def _gpus_here(group: PlacementGroup, taken: Resources) -> tuple[str, ...]:
    """Ask for the GPUs of this machine's part, which stay the group's."""
    if not taken.num_gpus:
        return ()
    actor = _actor_class(group, 0, taken).remote()
    found = tuple(ray.get(actor.gpus.remote()))
    ray.kill(actor)
    return found


def _actor_class(group: PlacementGroup, node: int, taken: Resources) -> Any:
    """Make the class of an actor that has the part of a node."""
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
    return ray.remote(num_cpus=taken.num_processors, num_gpus=taken.num_gpus, scheduling_strategy=place)(
        _Node
    )


def _find(config: EngineConfig, here: str, possible: list[int], given: str) -> tuple[PlacementGroup, int]:
    """Ask for one number of nodes after another: the processors of the fewest may be taken."""
    assert config.ray is not None
    timeout_s = config.ray.timeout_s
    asked: dict[str, None] = {}
    for num_nodes, wait_s in turns(possible, timeout_s, time.monotonic):
        taken = share_of(config, num_nodes).taken
        needed = _count(num_nodes, taken)
        asked[needed] = None
        log.info("asking Ray for %s; %s", needed, given)
        group = placement_group(
            [_bundle(taken)] * num_nodes,
            strategy="STRICT_PACK" if num_nodes == 1 else "STRICT_SPREAD",
            bundle_label_selector=[{_NODE_ID_LABEL: here}, *[{}] * (num_nodes - 1)],
        )
        if group.wait(wait_s):
            return group, num_nodes
        remove_placement_group(group)
    threads = "" if config.worker.device.startswith("cuda") else "--num-threads or "
    free = _brief(_resources_of(ray.available_resources()))
    raise StartupError(
        f"Ray has not found {', or '.join(asked)} within {timeout_s:.0f} s; {given}, {free} of all free",
        fix=f"add nodes, end what uses them, or lower {threads}the number of ranks",
    )


def _bundle(taken: Resources) -> dict[str, float]:
    bundle: dict[str, float] = {_CPU: taken.num_processors}
    return bundle | {_GPU: taken.num_gpus} if taken.num_gpus else bundle


def _count(num_nodes: int, taken: Resources) -> str:
    each = f"{taken.num_processors} processor{'s' if taken.num_processors > 1 else ''}"
    if taken.num_gpus:
        each += f" and {_gpus(taken)}"
    return f"{each} on this node" + (f" and on {num_nodes - 1} more" if num_nodes > 1 else "")


def _describe(here: Resources, others: list[Resources]) -> str:
    more = ", ".join(map(_brief, sorted(others, reverse=True))) or "none"
    return f"it has {_brief(here)} on this node, and on others: {more}"


def _brief(each: Resources) -> str:
    return f"{each.num_processors}" + (f" with {_gpus(each)}" if each.num_gpus else "")


def _gpus(each: Resources) -> str:
    return f"{each.num_gpus} GPU{'s' if each.num_gpus > 1 else ''}"


def _hold(config: EngineConfig, group: PlacementGroup, log_level: int) -> int:
    """Run the agents until one is lost, or all have ended by themselves."""
    agents: dict[Any, int] = {}
    num_nodes = config.worker.num_nodes
    taken = share_of(config, num_nodes).taken
    actors = []  # Ray ends those that nothing refers to
    for node in range(1, num_nodes):
        actors.append(_actor_class(group, node, taken).remote())
        agents[actors[-1].run.remote(options_of(config, node, log_level))] = node
    if not agents:
        threading.Event().wait()
    while agents:
        (ended,), _ = ray.wait(list(agents), num_returns=1)
        node = agents.pop(ended)
        try:
            refusal = ray.get(ended)
        except ray.exceptions.RayError as error:
            log.critical("node %d is lost, as Ray reports: %s", node, " ".join(str(error).split())[:1000])
            return EXIT_WORKER_BROKEN
        if refusal:
            raise StartupError(f"node {node}: {refusal[0]}", fix=refusal[1])
    return 0


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
