"""Two replicas behind a load balancer are replaced one by one: no client of the SDK notices."""

import asyncio
import contextlib
import signal
from collections import Counter
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.e2e.serving import RunningServer, running_server
from tests.faults.clients import num_tokens_streamed, num_tokens_whole
from tests.faults.proxy import Proxy, proxying

pytestmark = pytest.mark.night

NUM_CLIENTS = 4
NUM_STREAMED, NUM_WHOLE = 200, 20
"""Tokens. Streams are long, so that some are in the middle whenever a replica is told to leave: what is
lost then, no client can ask for again without its user noticing."""


class Load:
    """Clients that ask again and again, every other time for a stream. The first error ends one."""

    def __init__(self, proxy: Proxy) -> None:
        self.num_answers = Counter[str]()
        # With the SDK's own retries, and one pool of kept connections for all, as an application has it.
        self._client = AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", timeout=30)
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(NUM_CLIENTS)]
        self._is_over = False

    async def finish(self) -> None:
        """Raises what went wrong for any of them."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._client.close()

    async def until_more(self, num: int) -> None:
        wanted = self.num_answers.total() + num
        while self.num_answers.total() < wanted and not any(task.done() for task in self._tasks):
            await asyncio.sleep(0.02)

    async def _ask_on(self) -> None:
        while not self._is_over:
            assert await num_tokens_streamed(self._client, NUM_STREAMED) == NUM_STREAMED
            self.num_answers["stream"] += 1
            assert await num_tokens_whole(self._client, NUM_WHOLE) == NUM_WHOLE
            self.num_answers["whole"] += 1


async def start(stack: contextlib.ExitStack, folder: Path, model: Path) -> RunningServer:
    folder.mkdir()
    return await asyncio.to_thread(stack.enter_context, running_server(folder, str(model)))


async def replace(proxy: Proxy, old: RunningServer, new: RunningServer | None) -> None:
    """Ask the old one to leave, as a cluster does: the proxy notices by itself that it is not ready."""
    await old.until_in_flight(1)
    old.send(signal.SIGTERM)
    assert await asyncio.to_thread(old.wait) == 0
    proxy.replicas.remove(old.url)
    if new is not None:
        proxy.replicas.append(new.url)
    await until_seen(proxy, set(proxy.replicas))


async def until_seen(proxy: Proxy, ready: set[str]) -> None:
    async with asyncio.timeout(30):
        while set(proxy.ready) != ready:
            await asyncio.sleep(0.02)


async def test_a_rolling_restart_under_load_loses_no_request(
    tiny_model: Path, tmp_path: Path, mortal_server: RunningServer
) -> None:
    new = mortal_server
    with contextlib.ExitStack() as stack:
        # Both at once: starting takes nearly all of the time.
        old = await asyncio.gather(*(start(stack, tmp_path / name, tiny_model) for name in ("a", "b")))
        async with proxying() as proxy:
            proxy.replicas = [server.url for server in old]
            await until_seen(proxy, set(proxy.replicas))
            load = Load(proxy)
            await load.until_more(NUM_CLIENTS)
            await replace(proxy, old[0], new)
            await load.until_more(NUM_CLIENTS)
            await replace(proxy, old[1], None)
            await load.until_more(NUM_CLIENTS)
            await load.finish()
    assert proxy.num_connections.keys() == {server.url for server in (*old, new)}, "all three served"
    assert min(load.num_answers["stream"], load.num_answers["whole"]) >= NUM_CLIENTS
