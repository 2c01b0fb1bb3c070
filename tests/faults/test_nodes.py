"""One model on two nodes, which reach each other over a cable: the same tokens, and life after each cut.

Two nodes divide each layer, where a cut is worst. Three have a stage each, which their ranks divide.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from campaigns.servers.free_ports import free_port
from campaigns.servers.relay import Relay, relaying
from engine.frontend.client import AsyncEngine
from engine.options.engine_config import resolve
from engine.options.sources import read_options
from engine.processes import engine_processes as lives
from engine.types import GenerationRequest, SamplingParams
from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint
from tests.engine.nodes.test_switchboard import KEY
from tests.worker.plan_driver import PlanDriver
from worker.worker import Worker

pytestmark = [pytest.mark.night, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120
NUM_LONG = 120
PROMPTS = [[5, 6, 7, 8 + i] * (1 + 5 * i) for i in range(4)]
NUM_TOKENS = 24
SEATS = 4
GIVEN = {"dtype": "float32", "num_threads": "1", "max_num_seqs": str(SEATS)}
TWO_SHARDS = {"tensor_parallel_size": "2"}
THREE_STAGES = {"pipeline_parallel_size": "3"}


class Cluster(NamedTuple):
    engine: AsyncEngine
    relay: Relay
    log: Path
    """Log of the second node."""
    node: "subprocess.Popen[bytes]"


@contextmanager
def other_node(
    model: Path,
    address: str,
    port: int,
    log: Path,
    split: dict[str, str],
    *,
    rank: int = 1,
    num_nodes: int = 2,
    module: str = "server",
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start it as torchrun does: by variables alone."""
    given = {"MASTER_ADDR": address, "MASTER_PORT": "1", "RANK": str(rank), "WORLD_SIZE": str(num_nodes)}
    given |= {"TOKENYARD_CLUSTER_KEY": KEY, "TOKENYARD_CLUSTER_PORT": str(port), "TMPDIR": str(log.parent)}
    given |= {f"TOKENYARD_{name.upper()}": value for name, value in split.items()}
    with log.open("ab") as file:
        node = subprocess.Popen(
            [sys.executable, "-m", module, "serve", str(model), "--num-threads", "1"],
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


@asynccontextmanager
async def first_node(
    model: Path, port: int, num_nodes: int, split: dict[str, str], given: dict[str, str] = GIVEN
) -> AsyncIterator[AsyncEngine]:
    """Start the engine, which waits for the others."""
    place = {"model": str(model), "nnodes": str(num_nodes), "node_rank": "0"}
    place |= {"master_addr": "127.0.0.1", "cluster_port": str(port), "cluster_key": KEY}
    config, _ = resolve(read_options(place | given | split, {}), environment={})
    engine = AsyncEngine(config)
    engine.start()
    await asyncio.wait_for(engine.ready(), WAIT_S)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), tiny_model, alpha=256)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    tiny_model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    folder, port = tmp_path_factory.mktemp("nodes"), free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lives, "_FIRST_BACK_OFF_S", 0.01)
        async with relaying(("127.0.0.1", port)) as relay:
            with other_node(tiny_model, relay.address, relay.port, folder / "log", TWO_SHARDS) as node:
                asked = TWO_SHARDS | {"lora_modules": f"adapter={adapter}"}
                async with first_node(tiny_model, port, 2, asked) as engine:
                    yield Cluster(engine, relay, folder / "log", node)
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


async def strike_begun(
    engine: AsyncEngine, name: str, strike: Callable[[], None]
) -> "list[asyncio.Task[int]]":
    """Strike once all of some long requests have begun; return them, each with its number of tokens."""
    begun = [asyncio.Event() for _ in range(SEATS)]

    async def run(i: int) -> int:
        num_tokens = 0
        async for _, output in engine.generate_all([request(f"{name} {i}", [9, i], max_tokens=NUM_LONG)]):
            num_tokens += len(output.token_ids)
            begun[i].set()
        return num_tokens

    running = [asyncio.create_task(run(i)) for i in range(SEATS)]
    await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), WAIT_S)
    strike()
    return running


async def leave(running: "list[asyncio.Task[int]]") -> None:
    """Give requests up, all of which are still under way."""
    assert not any(task.done() for task in running), "the next engine is not waited for"
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return tokens_of_one_process(tiny_model)


def tokens_of_one_process(model: Path, **more: str) -> list[list[int]]:
    """Generate for all prompts, with the adapter if there is one."""
    config, _ = resolve(read_options(GIVEN | {"model": str(model)} | more, {}), environment={})
    worker = Worker(config.worker)
    facts = worker.load(lambda _progress: None)
    driver = PlanDriver(worker, facts.block_size)
    identity = facts.adapters[0].identity if facts.adapters else ""
    sequences = [driver.add(prompt, adapter=identity) for prompt in PROMPTS]
    driver.generate(sequences, NUM_TOKENS)
    return [driver.generated(each)[:NUM_TOKENS] for each in sequences]


def ranks_of(node: "subprocess.Popen[bytes]") -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()]


async def test_two_nodes_that_divide_each_layer_sample_the_tokens_of_one_process(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    assert await all_tokens(cluster.engine) == expected
    assert len(ranks_of(cluster.node)) == 1


async def test_both_nodes_compute_an_adapter_beside_the_base(
    cluster: Cluster, tiny_model: Path, adapter: Path, expected: list[list[int]]
) -> None:
    adapted = tokens_of_one_process(tiny_model, lora_modules=f"adapter={adapter}")
    assert adapted != expected
    served = cluster.engine.info.adapter_named("adapter")
    asked = [replace(request(f"a{i}", prompt), adapter=served) for i, prompt in enumerate(PROMPTS)]
    both = asyncio.gather(*(tokens_of(cluster.engine, each) for each in asked)), all_tokens(cluster.engine)
    assert await asyncio.gather(*both) == [adapted, expected]


async def test_a_node_ends_with_the_first_that_was_asked_to_end(tiny_model: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    with other_node(tiny_model, "127.0.0.1", port, log, TWO_SHARDS) as node:
        async with first_node(tiny_model, port, 2, TWO_SHARDS):
            assert len(ranks_of(node)) == 1
        assert node.wait(WAIT_S) == 0
    assert "ends with it" in log.read_text()


async def test_a_node_with_another_checkpoint_is_refused_in_one_line(
    cluster: Cluster, tmp_path: Path, expected: list[list[int]]
) -> None:
    other = make_checkpoint("llama", tmp_path / "other", num_hidden_layers=2)
    address, port = cluster.relay.address, cluster.relay.port
    with other_node(other, address, port, tmp_path / "log", TWO_SHARDS) as node:
        assert await asyncio.to_thread(node.wait, WAIT_S) == 78
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if "refused" in line]
    assert "node 1 has a checkpoint that the first node has not" in line
    assert await all_tokens(cluster.engine) == expected


async def fails_and_heals(
    engine: AsyncEngine, name: str, strike: Callable[[], None], mend: Callable[[], None]
) -> list[list[int]]:
    """Check that begun requests go on in the next engine; return the tokens of others, which begin there."""
    waiting: list[asyncio.Task[list[list[int]]]] = []

    def strike_while_others_wait() -> None:
        waiting.append(asyncio.create_task(all_tokens(engine)))
        asyncio.get_running_loop().call_soon(strike)

    begun = await strike_begun(engine, name, strike_while_others_wait)
    died = engine._engines.pids[0]
    while engine._engines.pids[0] == died:
        await asyncio.sleep(0.05)
    assert not any(task.done() for task in begun)
    mend()
    assert await asyncio.gather(*begun) == [NUM_LONG] * SEATS
    return await waiting[0]


async def test_a_cut_cable_ends_the_engine_and_both_nodes_find_each_other_again(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    before, relay = ranks_of(cluster.node), cluster.relay
    assert await fails_and_heals(cluster.engine, "cut", relay.cut, relay.mend) == expected
    assert ranks_of(cluster.node) != before
    assert cluster.node.poll() is None, "the node itself stays"


async def test_a_node_that_stands_still_ends_the_engine_and_takes_part_in_the_next(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    before, node = ranks_of(cluster.node), cluster.node

    def send(number: signal.Signals) -> None:
        for pid in (node.pid, *before):
            os.kill(pid, number)

    go_on = partial(send, signal.SIGCONT)
    try:
        assert await fails_and_heals(cluster.engine, "stop", partial(send, signal.SIGSTOP), go_on) == expected
    except BaseException:
        go_on()  # or it could not be ended
        raise
    assert ranks_of(cluster.node) != before


async def test_three_nodes_of_two_ranks_sample_the_same_tokens_and_the_death_of_one_rank_ends_all(
    tiny_model: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    port = free_port()
    with ExitStack() as stack:
        others = [
            stack.enter_context(
                other_node(
                    tiny_model, "127.0.0.1", port, tmp_path / "log", THREE_STAGES, rank=rank, num_nodes=3
                )
            )
            for rank in (1, 2)
        ]
        async with first_node(tiny_model, port, 3, THREE_STAGES | TWO_SHARDS) as engine:
            assert await all_tokens(engine) == expected
            assert [len(ranks_of(node)) for node in others] == [2, 2]
            kill = partial(os.kill, ranks_of(others[1])[1], signal.SIGKILL)
            died = engine._engines.pids[0]
            begun = await strike_begun(engine, "kill", kill)
            while engine._engines.pids[0] == died:
                await asyncio.sleep(0.05)
            await leave(begun)
