"""One model on two nodes, which reach each other over a cable: the same tokens, and life after each cut."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from engine.errors import EngineDied
from engine.frontend.client import AsyncEngine
from engine.options.engine_config import resolve
from engine.options.option_sources import read_options
from engine.processes import engine_processes as lives
from engine.types import GenerationRequest, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.engine.nodes.test_switchboard import KEY, free_port
from tests.faults.relay import Relay, relaying
from tests.worker.plan_driver import PlanDriver
from worker.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120
PROMPTS = [[5, 6, 7, 8 + i] * (1 + 5 * i) for i in range(4)]
NUM_TOKENS = 24
SEATS = 4
GIVEN = {"pipeline_parallel_size": "2", "dtype": "float32", "num_threads": "1", "max_num_seqs": str(SEATS)}


class Cluster(NamedTuple):
    engine: AsyncEngine
    relay: Relay
    log: Path
    """Log of the second node."""
    node: "subprocess.Popen[bytes]"


@contextmanager
def second_node(model: Path, relay: Relay, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start it as torchrun does: by variables alone."""
    given = {"MASTER_ADDR": relay.address, "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}
    given |= {
        "TOKENYARD_CLUSTER_KEY": KEY,
        "TOKENYARD_CLUSTER_PORT": str(relay.port),
        "TMPDIR": str(log.parent),
    }
    words = [str(model), "--pipeline-parallel-size", "2", "--num-threads", "1"]
    with log.open("ab") as file:
        node = subprocess.Popen(
            [sys.executable, "-m", "server", "serve", *words],
            cwd=ROOT,
            env=os.environ | given,
            stdin=subprocess.DEVNULL,
            stderr=file,
        )
    try:
        yield node
    finally:
        if node.poll() is None:
            node.terminate()
        assert node.wait(WAIT_S) in (0, 78)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder, port = tmp_path_factory.mktemp("nodes"), free_port()
    given = GIVEN | {"model": str(tiny_model), "nnodes": "2", "node_rank": "0", "master_addr": "127.0.0.1"}
    given |= {"cluster_port": str(port), "cluster_key": KEY}
    config, _ = resolve(read_options(given, {}), environment={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lives, "_FIRST_BACK_OFF_S", 0.01)
        async with relaying(("127.0.0.1", port)) as relay:
            with second_node(tiny_model, relay, folder / "log") as node:
                engine = AsyncEngine(config)
                engine.start()
                await asyncio.wait_for(engine.ready(), WAIT_S)
                yield Cluster(engine, relay, folder / "log", node)
                await engine.close()
    assert not list(folder.glob("tokenyard-*")), "a folder was left behind"


def request(name: str, prompt: list[int], *, max_tokens: int = NUM_TOKENS) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params)


async def tokens_of(engine: AsyncEngine, asked: GenerationRequest) -> list[int]:
    async with asyncio.timeout(WAIT_S):
        return [token async for _, output in engine.generate_all([asked]) for token in output.token_ids]


async def all_tokens(engine: AsyncEngine) -> list[list[int]]:
    asked = [tokens_of(engine, request(f"r{i}", prompt)) for i, prompt in enumerate(PROMPTS)]
    return list(await asyncio.gather(*asked))


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return tokens_of_one_process(tiny_model)


def tokens_of_one_process(model: Path) -> list[list[int]]:
    given = GIVEN | {"pipeline_parallel_size": "1", "model": str(model)}
    config, _ = resolve(read_options(given, {}), environment={})
    worker = Worker(config.worker)
    driver = PlanDriver(worker, worker.load(lambda _progress: None).block_size)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(sequences, NUM_TOKENS)
    return [driver.generated(each)[:NUM_TOKENS] for each in sequences]


def ranks_of(node: "subprocess.Popen[bytes]") -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()]


async def test_two_nodes_sample_the_tokens_of_one_process(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    assert await all_tokens(cluster.engine) == expected
    assert len(ranks_of(cluster.node)) == 1


async def test_a_node_with_another_checkpoint_is_refused_in_one_line(
    cluster: Cluster, tmp_path: Path, expected: list[list[int]]
) -> None:
    other = make_checkpoint("llama", tmp_path / "other", num_hidden_layers=2)
    with second_node(other, cluster.relay, tmp_path / "log") as node:
        assert await asyncio.to_thread(node.wait, WAIT_S) == 78
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if "refused" in line]
    assert "node 1 has a checkpoint that the first node has not" in line
    assert await all_tokens(cluster.engine) == expected


async def _fails_and_heals(cluster: Cluster, expected: list[list[int]], strike: str) -> None:
    """Requests that have begun fail; others go to the next engine, which needs both nodes."""
    begun = [asyncio.Event() for _ in range(SEATS)]

    async def run(i: int) -> None:
        async for _ in cluster.engine.generate_all([request(f"{strike} {i}", [9, i], max_tokens=480)]):
            begun[i].set()

    running = [asyncio.create_task(run(i)) for i in range(SEATS)]
    await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), WAIT_S)
    waiting = asyncio.create_task(all_tokens(cluster.engine))
    await asyncio.sleep(0)
    if strike == "cut":
        cluster.relay.cut()
    elif strike == "stop":
        cluster.node.send_signal(signal.SIGSTOP)
    else:
        os.kill(ranks_of(cluster.node)[0], signal.SIGKILL)
    ends = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), WAIT_S)
    assert [type(end) for end in ends] == [EngineDied] * SEATS
    cluster.relay.mend()
    cluster.node.send_signal(signal.SIGCONT)
    assert await waiting == expected


async def test_a_cut_cable_ends_the_engine_and_both_nodes_find_each_other_again(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    before = ranks_of(cluster.node)
    await _fails_and_heals(cluster, expected, "cut")
    assert ranks_of(cluster.node) != before
    assert cluster.node.poll() is None, "the node itself stays"


async def test_an_agent_that_stands_still_ends_the_engine_and_takes_part_in_the_next(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    before = ranks_of(cluster.node)
    await _fails_and_heals(cluster, expected, "stop")
    assert ranks_of(cluster.node) != before


async def test_the_death_of_a_rank_on_the_other_node_ends_the_engine_and_the_next_serves(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    await _fails_and_heals(cluster, expected, "kill")
