"""One model on the GPUs of two nodes, which are stand-ins: the tokens of one process, and the end of both."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from campaigns.servers.free_ports import free_port
from engine.frontend.client import AsyncEngine
from engine.processes import supervisor
from engine.types import GenerationRequest, TokenOutput
from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint
from tests.faults.gpu_node import NAME
from tests.faults.test_nodes import (
    PROMPTS,
    SEATS,
    WAIT_S,
    first_node,
    leave,
    other_node,
    ranks_of,
    request,
    strike_begun,
    tokens_of_one_process,
)
from tests.worker.gpu.interpreted_gpu import HAS_GPU

pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(HAS_GPU, reason="stand-ins are needed"),
    pytest.mark.asyncio(loop_scope="module"),
]

Node = subprocess.Popen[bytes]
ADDRESS = "127.0.0.2"
NUM_TOKENS = 6
GIVEN = {"dtype": "float32", "device": "cuda", "enforce_eager": "true", "max_num_seqs": str(SEATS)}
GIVEN |= {"num_gpu_blocks_override": "200"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer for each stage: interpreted kernels take their time."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return tokens_of_one_process(model)[1][:NUM_TOKENS]


def first_request(name: str) -> GenerationRequest:
    return request(name, PROMPTS[1], max_tokens=NUM_TOKENS)


async def outputs_of(engine: AsyncEngine, asked: GenerationRequest) -> list[TokenOutput]:
    async with asyncio.timeout(WAIT_S):
        return [output async for _, output in engine.generate_all([asked])]


def tokens_in(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@asynccontextmanager
async def two_nodes(
    model: Path, folder: Path, split: dict[str, str], **more: str
) -> AsyncIterator[tuple[AsyncEngine, Node]]:
    """Run a node with one GPU on each of two addresses of this machine."""
    port, log = free_port(), folder / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        patch.setattr(
            supervisor,
            "_child_arguments",
            lambda directory: ["-m", NAME, str(directory), str(os.getpid()), "20", str(log)],
        )
        with other_node(model, ADDRESS, port, log, split, module=NAME) as node:
            given = GIVEN | {"master_addr": ADDRESS} | more
            async with first_node(model, port, 2, split, given) as engine:
                yield engine, node


async def until_gone(pids: list[int]) -> None:
    async with asyncio.timeout(WAIT_S):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.02)


async def test_stages_on_two_nodes_draw_the_tokens_of_one_process_and_a_killed_rank_ends_both(
    model: Path, tmp_path: Path, expected: list[int]
) -> None:
    async with two_nodes(model, tmp_path, {"pipeline_parallel_size": "2"}) as (engine, node):
        assert tokens_in(await outputs_of(engine, first_request("first"))) == expected
        (rank,) = ranks_of(node)
        assert engine._engines.pids[0] is not None
        first = engine._engines.pids[0]
        kill = partial(os.kill, rank, signal.SIGKILL)
        begun = await strike_begun(engine, "kill", kill)
        await until_gone([rank, first])
        await leave(begun)


async def test_a_stage_on_two_nodes_draws_the_same_tokens_and_a_rank_inside_a_sum_ends_with_the_other_node(
    model: Path, tmp_path: Path, expected: list[int]
) -> None:
    """An adapter and drafts beside the base; then a node that stands still while the other sums."""
    adapter = write_adapter(tmp_path / "adapter", model, alpha=256)
    named = {"lora_modules": f"adapter={adapter}"}
    adapted = tokens_of_one_process(model, **named)[1][:NUM_TOKENS]
    assert adapted != expected
    split = {"tensor_parallel_size": "2"}
    async with two_nodes(model, tmp_path, split, **named) as (engine, node):
        served = engine.info.adapter_named("adapter")
        asked = [first_request("base"), replace(first_request("adapter"), adapter=served)]
        asked.append(replace(first_request("drafts"), prediction=tuple(expected)))
        found = await asyncio.gather(*(outputs_of(engine, each) for each in asked))
        assert list(map(tokens_in, found)) == [expected, adapted, expected]
        assert sum(output.num_accepted_prediction for output in found[-1]) > 0
        assert engine._engines.pids[0] is not None
        first, others = engine._engines.pids[0], [node.pid, *ranks_of(node)]

        def send(number: signal.Signals) -> None:
            for pid in others:
                os.kill(pid, number)

        try:
            stop = partial(send, signal.SIGSTOP)
            begun = await strike_begun(engine, "stop", stop)
            await until_gone([first])
            await leave(begun)
        finally:
            send(signal.SIGCONT)
        await until_gone(others[1:])
