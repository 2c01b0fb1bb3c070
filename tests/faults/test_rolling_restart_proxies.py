"""Two replicas behind a real HAProxy and a real nginx, with the configurations of deploy/proxies."""

import asyncio
import contextlib
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import APIError, AsyncOpenAI

from campaigns.servers.free_ports import free_port
from tests.e2e.serving import RunningServer, running_server, wait_for
from tests.faults.clients import num_tokens_streamed, num_tokens_whole
from tests.faults.real_proxies import NAMES, installed, program, running_proxy

pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(not installed(), reason="neither HAProxy nor nginx is installed"),
]

NUM_CLIENTS = 2
"""For each proxy."""
NUM_STREAMED, NUM_WHOLE = 200, 20
"""Tokens. Streams are long, so that some are in the middle whenever a replica is told to leave."""
DRAIN_DELAY = ("--drain-delay", "2")
"""Longer than HAProxy needs to notice, and than nginx leaves a replica alone that has failed."""


def asked(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "Once", "ignore_eos": True, **fields}


class Load:
    """Clients that ask again and again, but nothing twice: what a proxy lets through is an error."""

    def __init__(self, url: str) -> None:
        self.num_answers = Counter[str]()
        self.errors: list[APIError] = []
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=30, max_retries=0)
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(NUM_CLIENTS)]
        self._is_over = False

    async def finish(self) -> None:
        """Raises what is no error of a request."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._client.close()

    async def until_more(self, num: int) -> None:
        """Wait for `num` more answers or errors."""
        wanted = self.num_answers.total() + len(self.errors) + num
        while self.num_answers.total() + len(self.errors) < wanted:
            assert not any(task.done() for task in self._tasks)
            await asyncio.sleep(0.02)

    async def _ask_on(self) -> None:
        while not self._is_over:
            try:
                assert await num_tokens_streamed(self._client, NUM_STREAMED) == NUM_STREAMED
                self.num_answers["stream"] += 1
                assert await num_tokens_whole(self._client, NUM_WHOLE) == NUM_WHOLE
                self.num_answers["whole"] += 1
            except APIError as error:
                self.errors.append(error)
            await asyncio.sleep(0.05)  # leaves something of the machine to the replica that starts


@dataclass(frozen=True)
class RolledOut:
    """State when the first replica was replaced at its address and the second has left for good."""

    replica: RunningServer
    urls: dict[str, str]
    """Address of each proxy."""
    loads: dict[str, Load]
    """Loads of each proxy, which are over."""


class RollOut:
    """Replicas, and all proxies in front of the same ones, since starting takes long."""

    def __init__(self, stack: contextlib.ExitStack, model: Path, folder: Path) -> None:
        self._stack, self._model, self._folder = stack, model, folder
        self._addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        with ThreadPoolExecutor() as pool:
            self._first, self._second = pool.map(self._start, self._addresses, ("first", "second"))
        self.urls = {
            name: stack.enter_context(running_proxy(name, folder / name, self._addresses)).url
            for name in installed()
        }

    async def run(self) -> RolledOut:
        loads = {name: Load(url) for name, url in self.urls.items()}
        async with asyncio.timeout(120):
            await until_more(loads)
            await leave(self._first)
            returned = await asyncio.to_thread(self._start, self._addresses[0], "returned")
            await until_more(loads)
            await leave(self._second)
            await until_more(loads)
        for load in loads.values():
            await load.finish()
        return RolledOut(returned, self.urls, loads)

    def _start(self, address: str, name: str) -> RunningServer:
        folder = self._folder / name
        folder.mkdir()
        options = ("--port", address.split(":")[1], *DRAIN_DELAY)
        return self._stack.enter_context(running_server(folder, str(self._model), *options))


async def until_more(loads: dict[str, Load]) -> None:
    await asyncio.gather(*(load.until_more(2 * NUM_CLIENTS) for load in loads.values()))


async def leave(replica: RunningServer) -> None:
    """In the middle of its work."""
    await replica.until_in_flight(1)
    replica.send(signal.SIGTERM)
    assert await asyncio.to_thread(replica.wait) == 0


@pytest.fixture(scope="module")
def rolled_out(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolledOut]:
    with contextlib.ExitStack() as stack:
        yield asyncio.run(RollOut(stack, tiny_model, tmp_path_factory.mktemp("roll_out")).run())


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Name of a proxy that is installed."""
    name: str = request.param
    if program(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


def test_a_rolling_restart_under_load_loses_not_even_a_request_that_nobody_repeats(
    rolled_out: RolledOut, name: str
) -> None:
    assert rolled_out.loads[name].errors == []
    num_answers = rolled_out.loads[name].num_answers
    assert min(num_answers["stream"], num_answers["whole"]) >= 2 * NUM_CLIENTS


async def test_tokens_come_through_as_they_are_made(rolled_out: RolledOut, name: str) -> None:
    # Once is enough: a busy machine may be late with reading. None would be legible if they were compressed.
    async with httpx.AsyncClient(base_url=rolled_out.urls[name]) as client:
        assert 1 <= min([await num_in_first_piece(client) for _ in range(5)]) < 4


async def num_in_first_piece(client: httpx.AsyncClient) -> int:
    """Events, of 16."""
    body = asked(max_tokens=16, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        return (await anext(reply.aiter_raw())).count(b"data:")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_hangs_up_has_its_sequences_aborted(
    rolled_out: RolledOut, name: str, is_streamed: bool
) -> None:
    replica = rolled_out.replica
    num_left = replica.metric("tokenyard:request_aborts_total")
    body = asked(max_tokens=450, n=16, stream=is_streamed)
    async with httpx.AsyncClient(base_url=rolled_out.urls[name], timeout=30) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await replica.until_in_flight(16, asking)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await asyncio.to_thread(replica.wait_until_idle)
    assert replica.metric("tokenyard:request_aborts_total") > num_left


def test_names_of_requests_and_traces_reach_the_replica(rolled_out: RolledOut, name: str) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"x-request-id": f"ask-{name}", "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    url = f"{rolled_out.urls[name]}/v1/completions"
    named = httpx.post(url, json=asked(max_tokens=1), headers=headers)
    assert named.headers.get_list("x-request-id") == [f"ask-{name}"]
    wait_for(lambda: f"ask-{name}" in rolled_out.replica.text())
    (line,) = [line for line in rolled_out.replica.text().splitlines() if f"ask-{name}" in line]
    assert trace_id in line
    unnamed = httpx.post(url, json=asked(max_tokens=1))
    # One of ours begins with req_: this one was drawn by the proxy, whose log has it too.
    assert len(unnamed.headers["x-request-id"].replace("-", "")) == 32


def test_the_replica_itself_refuses_what_is_too_large(rolled_out: RolledOut, name: str) -> None:
    body = asked(prompt="x" * (4 * 2**20 + 1))
    refused = httpx.post(f"{rolled_out.urls[name]}/v1/completions", json=body)
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_too_large"


def test_metrics_of_one_replica_are_not_shown_as_those_of_all(rolled_out: RolledOut, name: str) -> None:
    assert httpx.get(f"{rolled_out.urls[name]}/metrics").status_code == 404
    assert httpx.get(f"{rolled_out.urls[name]}/health/ready").status_code == 200


class Witness:
    """Clients of one proxy while a replica is killed: half stream, half wait for the whole answer."""

    NUM_EACH = 4
    NUM_TOKENS = 480

    def __init__(self, url: str) -> None:
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
        self._num_begun = 0
        self._streams = [asyncio.create_task(self._stream()) for _ in range(self.NUM_EACH)]
        self._wholes = [asyncio.create_task(self._whole()) for _ in range(self.NUM_EACH)]

    async def ends(self) -> Counter[str]:
        """Ends of streams: finish reasons, None where there was none, and names of errors."""
        ends = await asyncio.gather(*self._streams, return_exceptions=True)
        await self._client.close()
        return Counter(type(end).__name__ if isinstance(end, Exception) else str(end) for end in ends)

    async def whole_ends(self) -> set[str]:
        """Finish reasons. Raises what the SDK raises."""
        return set(await asyncio.gather(*self._wholes))

    async def until_all_streams_have_begun(self) -> None:
        while self._num_begun < self.NUM_EACH:
            await asyncio.sleep(0.01)

    async def _stream(self) -> str | None:
        """The finish reason; None without one. Raises what the SDK raises."""
        reason = None
        stream = await self._client.completions.create(
            model="deep",
            prompt="Once",
            max_tokens=self.NUM_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        self._num_begun += 1
        async for chunk in stream:
            reason = chunk.choices[0].finish_reason or reason
        return reason

    async def _whole(self) -> str:
        answer = await self._client.completions.create(
            model="deep", prompt="Once", max_tokens=self.NUM_TOKENS, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].finish_reason


async def test_a_replica_that_is_killed_costs_the_streams_that_had_begun_there_and_nothing_else(
    deep_model: Path, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        folders = [tmp_path / "first", tmp_path / "second"]
        first, second = await asyncio.gather(*(start(stack, folder, deep_model) for folder in folders))
        addresses = [replica.url.removeprefix("http://") for replica in (first, second)]
        urls = {
            name: stack.enter_context(running_proxy(name, tmp_path / name, addresses)).url
            for name in installed()
        }
        witnesses = {name: Witness(url) for name, url in urls.items()}
        for witness in witnesses.values():
            await witness.until_all_streams_have_begun()
        async with asyncio.timeout(30):
            await first.until_in_flight(Witness.NUM_EACH * len(urls) - 2)  # half of all, or nearly
        kill(first, folders[0])
        for name, witness in witnesses.items():
            assert await witness.whole_ends() == {"length"}, name
            # Some were with either, and none looks complete that was cut off.
            assert (await witness.ends()).keys() == {"length", "APIConnectionError"}, name
        kill(second, folders[1])
        for name, url in urls.items():
            told = httpx.post(f"{url}/v1/completions", json=asked(max_tokens=1))
            assert (told.status_code, told.json()["error"]["code"]) == (503, "not_ready"), name
            assert told.headers["retry-after"] == "1"


async def start(stack: contextlib.ExitStack, folder: Path, model: Path) -> RunningServer:
    folder.mkdir()
    return await asyncio.to_thread(stack.enter_context, running_server(folder, str(model)))


def kill(replica: RunningServer, folder: Path) -> None:
    """Without a chance to clear up, which the next server of this machine would do."""
    replica.send(signal.SIGKILL)
    replica.wait()
    for left in folder.glob("tokenyard-*"):
        shutil.rmtree(left)
