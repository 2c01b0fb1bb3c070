"""One model on the nodes of a real Ray cluster: the same tokens, and life after each loss."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio

from campaigns.servers.free_ports import free_port
from engine.frontend.client import AsyncEngine
from engine.options.engine_config import EngineConfig, resolve
from engine.options.sources import read_options
from engine.processes import engine_processes as lives
from engine.processes.child_process import CONFIG_FILE
from engine.ray_cluster.nodes import RayNodes
from tests.faults.ray_cluster import RayCluster, processes_of, ray_cluster
from tests.faults.test_nodes import GIVEN, WAIT_S, all_tokens, fails_and_heals, tokens_of_one_process

# Found, not imported: it puts its own copies of packages on the path of all tests of this process.
pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(find_spec("ray") is None, reason="of the extra `ray`"),
    pytest.mark.asyncio(loop_scope="module"),
]


class Served(NamedTuple):
    engine: AsyncEngine
    ray: RayCluster


def config_of(model: Path, **more: str) -> EngineConfig:
    given = GIVEN | {"model": str(model), "distributed_executor": "ray", "master_addr": "127.0.0.1"}
    given |= {"pipeline_parallel_size": "2", "cluster_port": str(free_port()), **more}
    return resolve(read_options(given, {}), environment={})[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lives, "_FIRST_BACK_OFF_S", 0.01)
        patch.setenv("RAY_ADDRESS", found.address)
        found.add(num_processors=1)
        found.add(num_processors=1)
        yield found


@asynccontextmanager
async def placed(cluster: RayCluster, config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config)
    engine.start()
    try:
        await asyncio.wait_for(engine.ready(), WAIT_S)
        yield engine
    finally:
        await engine.close()
    async with asyncio.timeout(WAIT_S):
        while agents_below(cluster):  # Ray ends them with the placement
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(cluster: RayCluster, tiny_model: Path) -> AsyncIterator[Served]:
    async with placed(cluster, config_of(tiny_model)) as engine:
        yield Served(engine, cluster)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return tokens_of_one_process(tiny_model)


def agents_below(cluster: RayCluster) -> list[int]:
    """List the processes of the cluster that run the agent of a node."""
    found = []
    for pid in (pid for node in cluster.nodes for pid in processes_of(node.pid)):
        with suppress(OSError):
            if b"_Node" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


async def test_a_stage_is_divided_between_two_nodes_of_ray(
    cluster: RayCluster, tiny_model: Path, expected: list[list[int]]
) -> None:
    config = config_of(tiny_model, pipeline_parallel_size="1", tensor_parallel_size="2", nnodes="2")
    async with placed(cluster, config) as engine:
        assert len(agents_below(cluster)) == 1
        assert await all_tokens(engine) == expected


async def test_ray_gives_each_node_a_gpu_for_each_of_its_ranks(
    cluster: RayCluster, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_model)
    config = replace(config, worker=replace(config.worker, device="cuda", num_threads=None))
    (tmp_path / CONFIG_FILE).write_bytes(msgspec.msgpack.encode(config))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "of the test")
    nodes = RayNodes(tmp_path)
    try:
        found = await asyncio.to_thread(nodes.place, config, lambda _progress: None)
    finally:
        nodes.kill()
        nodes.wait()
    assert (found.worker.num_nodes, found.worker.num_gpus_of_a_node) == (2, 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    async with asyncio.timeout(WAIT_S):
        while agents_below(cluster):
            await asyncio.sleep(0.05)


async def test_ray_finds_two_nodes_which_sample_the_tokens_of_one_process(
    served: Served, expected: list[list[int]]
) -> None:
    assert await all_tokens(served.engine) == expected
    assert len(agents_below(served.ray)) == 1, "the fewest nodes that are large enough"


async def test_an_actor_that_dies_ends_the_engine_and_the_next_is_placed_anew(
    served: Served, expected: list[list[int]]
) -> None:
    (agent,) = agents_below(served.ray)
    kill = partial(os.kill, agent, signal.SIGKILL)
    assert await fails_and_heals(served.engine, "actor", kill, lambda: None) == expected
    assert agent not in agents_below(served.ray)


async def test_a_lost_node_ends_the_engine_and_another_takes_its_place(
    served: Served, expected: list[list[int]]
) -> None:
    add = partial(served.ray.add, num_processors=1)
    assert await fails_and_heals(served.engine, "node", served.ray.lose_last, add) == expected
    assert len(agents_below(served.ray)) == 1


@pytest.mark.parametrize(
    ("device", "asked", "less"),
    [
        ("cpu", "3 processors", "--num-threads or the number"),
        ("cuda", "2 processors and 2 GPUs", "the number"),
    ],
)
async def test_a_cluster_that_is_too_small_is_refused_in_one_line(
    served: Served, tiny_model: Path, device: str, asked: str, less: str
) -> None:
    config = config_of(tiny_model, num_threads="3", nnodes="2")
    assert config.ray is not None
    config = replace(config, ray=replace(config.ray, timeout_s=1.0))
    if device == "cuda":
        config = replace(config, worker=replace(config.worker, device=device, num_stages=4))
    engine = lives.EngineProcesses(config, on_message=lambda _: None, on_death=lambda _: None)
    gave_up = await asyncio.wait_for(engine.run(), WAIT_S)
    assert gave_up is not None
    assert gave_up.exit_code == 78
    begin = f"Ray has not found {asked} on this node and on 1 more within 1 s; "
    assert gave_up.what.startswith(begin + "it has 1 with 1 GPU on this node, and on others: 1")
    assert gave_up.fix == f"add nodes, end what uses them, or lower {less} of ranks"
