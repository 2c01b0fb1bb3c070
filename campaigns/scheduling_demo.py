"""Priorities, aging and fairness on the real server, beside plain first come, first served.

    python -m campaigns.scheduling_demo [--model FOLDER]

Starts `tokenyard serve` on a free loopback port twice for each scene, once plain and once with the options
of the scene, sends both the same requests, and prints how long the requests in question took. However fast
the machine is, some have to wait. It ends by itself after a minute or two and stops only what it started.
"""

import argparse
import asyncio
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

_URL = re.compile(r"listens on +(http://\S+)")
_READY_WITHIN_S = 120.0
_STREAM_S = 8.0
_SMALL = ("--max-num-seqs", "4", "--no-enable-prefix-caching", "--max-model-len", "2048")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One claim. `act` returns the seconds that the requests in question took."""

    claim: str
    measured: str
    base: tuple[str, ...]
    options: tuple[str, ...]
    act: Callable[["Client"], Awaitable[list[float]]]


class Client:
    """Sends completions to one server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=256))

    async def complete(self, num_prompt_tokens: int, max_tokens: int, **fields: object) -> float:
        """Seconds until the whole answer was there."""
        started_s = time.monotonic()
        prompt = [20 + place % 200 for place in range(num_prompt_tokens)]  # any model has these tokens
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        answer = await self._http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return time.monotonic() - started_s

    async def close(self) -> None:
        await self._http.aclose()


async def _urgent_among_slow(client: Client) -> list[float]:
    """Four long jobs have all places, and more of them wait; then urgent ones come."""
    slow = [asyncio.create_task(client.complete(10, 1000, priority=9)) for _ in range(12)]
    urgent = []
    for _ in range(5):
        await asyncio.sleep(0.2)
        urgent.append(await client.complete(10, 8, priority=0))
    await asyncio.gather(*slow)
    return urgent


async def _patient_under_load(client: Client) -> list[float]:
    """One patient request against more urgent ones, of which always more wait than there are places."""
    ends_s = time.monotonic() + _STREAM_S

    async def keep_sending() -> None:
        while time.monotonic() < ends_s:
            await client.complete(10, 150, priority=0)

    others = [asyncio.create_task(keep_sending()) for _ in range(12)]
    await asyncio.sleep(0.2)
    patient = await client.complete(10, 8, priority=5)
    await asyncio.gather(*others)
    return [patient]


async def _quiet_beside_flood(client: Client) -> list[float]:
    """One tenant sends 150 requests at once; another one sends one after the other."""
    flood = [asyncio.create_task(client.complete(10, 60, user="flood")) for _ in range(150)]
    await asyncio.sleep(0.2)
    quiet = [await client.complete(10, 8, user="quiet") for _ in range(5)]
    await asyncio.gather(*flood)
    return quiet


_PRIORITY = ("--scheduling-policy", "priority")
SCENES = (
    Scene(
        claim="the urgent displace the less urgent",
        measured="urgent requests",
        base=_SMALL,
        options=_PRIORITY,
        act=_urgent_among_slow,
    ),
    Scene(
        claim="aging ends starvation (strict priorities against --priority-aging 200ms)",
        measured="the patient request",
        base=(*_SMALL, *_PRIORITY, "--priority-aging", "0"),
        options=("--priority-aging", "200ms"),
        act=_patient_under_load,
    ),
    Scene(
        claim="a flood of one tenant does not delay another",
        measured="the quiet tenant",
        base=_SMALL,
        options=("--fairness", "tenant"),
        act=_quiet_beside_flood,
    ),
)


@contextlib.contextmanager
def _server(words: tuple[str, ...]) -> Iterator[str]:
    """The URL of a server that is ready."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "server", "serve", "--port", "0", *words]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield _wait_for_url(process, log)  # type: ignore[arg-type]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_url(process: "subprocess.Popen[bytes]", log: "tempfile._TemporaryFileWrapper[str]") -> str:
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < deadline_s:
        log.seek(0)
        text = log.read()
        found = _URL.search(text)
        if found:
            return found[1]
        if process.poll() is not None:
            raise SystemExit(f"the server did not start:\n{text}")
        time.sleep(0.1)
    raise SystemExit("the server was not ready in time")


async def _play(scene: Scene, url: str) -> list[float]:
    client = Client(url)
    try:
        await client.complete(5, 4)  # the first request warms caches up
        return await scene.act(client)
    finally:
        await client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: the built-in model)")
    model = parser.parse_args().model
    first = () if model is None else (str(model),)
    for scene in SCENES:
        print(f"\n{scene.claim}: seconds of {scene.measured}")
        worst = []
        for name, words in (("plain", scene.base), ("with", (*scene.base, *scene.options))):
            with _server((*first, *words)) as url:
                seconds = asyncio.run(_play(scene, url))
            worst.append(max(seconds))
            options = " ".join(scene.options) if name == "with" else ""
            print(f"  {name:6}{statistics.median(seconds):8.2f} median{worst[-1]:8.2f} worst   {options}")
        print(f"  ratio of the worst: {worst[0] / worst[1]:.1f}x")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
