"""Models that take turns: what is lost, how long one waits, whether memory comes back, and what others feel.

    python -m campaigns.model_turns [--requests 1000] [--clients 96] [--part turns,memory,switch,pauses]

`turns`: requests to three models of which one fits, each client with another model each time, and the same
one after the other in the order of arrival, as a server would do that looks no further. `memory`: what all
processes hold after each unload. `switch`: from a request for a model that is not loaded to its first token,
while another has its memory; `--model` is its checkpoint. `pauses`: the longest silence of a stream while
another model is loaded and unloaded.

Owns: the models' file, the load and the figures. Never: the server's start (servers/own_server.py).
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from campaigns.servers.free_ports import free_port
from campaigns.servers.running import ROOT, Launch, running
from server.edge.http.http_client import Target, Timeouts, exchange, open_stream

DEMO_MODEL = ROOT / "engine" / "demo_model"
NAMES = ("a", "b", "c")
_READY_WITHIN_S = 120.0
_LONGEST_S = 1200.0
_SPARE_S = 10.0
"""Time in which a spare process has imported what it waits with."""
_PARTS = ("turns", "memory", "switch", "pauses")


class Address:
    """A server of three models on demand, as its clients see it."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self._target = Target.parse(f"http://127.0.0.1:{port}")

    async def ask(self, model: str, max_tokens: int = 16) -> tuple[int, float]:
        """Return the status and the seconds of one request."""
        body = {"model": model, "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}
        began_s = time.perf_counter()
        reply = await self._post("/v1/completions", body)
        return reply, time.perf_counter() - began_s

    async def unload(self, model: str) -> None:
        """Unload a model, and wait until it is gone."""
        before = self.num_processes()
        await self._post("/models/unload", {"model": model})
        while await self.state(model) != "unloaded" or self.num_processes() == before:
            await asyncio.sleep(0.05)

    async def state(self, model: str) -> str:
        reply = await exchange(self._target, self._target.request("GET", "/v1/models"), timeouts=Timeouts())
        listed = json.loads(reply.body)["data"]
        return str(next(each["status"]["value"] for each in listed if each["id"] == model))

    async def metrics(self) -> str:
        reply = await exchange(self._target, self._target.request("GET", "/metrics"), timeouts=Timeouts())
        return reply.body.decode()

    async def gaps(self, model: str, max_tokens: int) -> list[float]:
        """Return the seconds between the events of one stream."""
        body = {"model": model, "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        gaps, last_s = [], None
        text = json.dumps(body).encode()
        path = "/v1/completions"
        async with open_stream(self._target, "POST", path, text, silence_s=_LONGEST_S) as reply:
            async for _ in reply.events():
                now_s = time.perf_counter()
                if last_s is not None:
                    gaps.append(now_s - last_s)
                last_s = now_s
        return gaps

    def engine_cpu_s(self) -> float:
        """Return the processor seconds of the engine process."""
        fields = Path(f"/proc/{self._engines()[0]}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def num_processes(self) -> int:
        """Count the server's processes that hold a model, and the server itself."""
        return 1 + len(self._engines())

    def held_bytes(self) -> int:
        """Return the resident memory of all its processes but the one that waits for a model."""
        pids = (self.pid, *_descendants(self.pid))
        return sum(_resident_bytes(each) for each in pids if not _is_spare(_command_line(each)))

    def _engines(self) -> list[int]:
        words = {pid: _command_line(pid) for pid in _descendants(self.pid)}
        return [pid for pid, each in words.items() if "engine.core.process" in each and not _is_spare(each)]

    async def _post(self, path: str, body: dict[str, object]) -> int:
        asked = self._target.request("POST", path, json.dumps(body).encode())
        return (await exchange(self._target, asked, timeouts=Timeouts(whole_s=_LONGEST_S))).status


def _descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _is_spare(words: list[str]) -> bool:
    """Tell whether an engine process has no configuration yet in its folder, the first word for it."""
    if "engine.core.process" not in words:
        return False
    return not Path(words[words.index("engine.core.process") + 1], "config.msgpack").exists()


def _resident_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def _block_bytes(folder: Path) -> int:
    """Return the bytes of 32 tokens of numbers of two bytes."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(32 * 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


@contextmanager
def serving(folder: Path, models: dict[str, Path], *, num_that_fit: int) -> Iterator[Address]:
    """Serve the models by their names, of which so many fit at once, by the size of their caches."""
    share = 0.8 / num_that_fit if num_that_fit < len(models) else 0.1
    cache_bytes = int(_available_bytes() * 0.7 * share)  # no token touches most of it
    entries = [
        f"  - {{model: {path}, served_model_name: {name}, num_gpu_blocks_override: "
        f"{cache_bytes // _block_bytes(path)}}}"
        for name, path in models.items()
    ]
    file = folder / "models.yaml"
    defaults = "defaults: {load: demand, num_threads: 1, dtype: bfloat16, block_size: 32, max_model_len: 512}"
    file.write_text("\n".join([defaults, "models:", *entries]))
    port = free_port()
    words = ("serve", "--port", str(port), "--models", str(file), "--max-queued-requests", "8192")
    command = (sys.executable, "-m", "server", *words)
    launch = Launch(command=command, variables={}, folder=ROOT, served_name=next(iter(models)))
    log = folder / "server.log"
    with running(
        launch, port=port, ready_path="/health/ready", log=log, ready_within_s=_READY_WITHIN_S
    ) as server:
        print(*[line for line in log.read_text().splitlines() if "memory: " in line], sep="\n")
        yield Address(server.pid, port)


async def _turns(here: Address, num_requests: int, num_clients: int) -> None:
    dice = random.Random(1)
    asked = [dice.choice(NAMES) for _ in range(num_requests)]
    line, ends = list(reversed(asked)), []

    async def client() -> None:
        while line:
            ends.append(await here.ask(line.pop()))

    began_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    took_s = time.perf_counter() - began_s
    waits_s = sorted(seconds for _, seconds in ends)
    statuses = {status: sum(each == status for each, _ in ends) for status, _ in ends}
    rate = len(ends) / took_s
    print(
        f"turns: {num_requests} requests of {num_clients} clients in {took_s:.0f} s: {rate:.2f}/s, {statuses}"
    )
    print(f"turns: waits: median {waits_s[len(waits_s) // 2]:.1f} s, longest {waits_s[-1]:.1f} s")
    loads = [line for line in (await here.metrics()).splitlines() if line.startswith("tokenyard:model_loads")]
    print("turns:", *loads)
    few = asked[: max(num_requests // 50, 8)]
    began_s = time.perf_counter()
    for model in few:
        await here.ask(model)
    in_order = len(few) / (time.perf_counter() - began_s)
    print(
        f"turns: in the order of arrival {in_order:.2f}/s ({len(few)} requests): {rate / in_order:.1f} times"
    )


async def _memory(here: Address, num_rounds: int) -> None:
    before = None
    for _ in range(num_rounds):
        for model in NAMES:
            await here.ask(model)
            loaded = here.held_bytes()
            await here.unload(model)
            held = here.held_bytes()
            before = held if before is None else before  # what the first load imports stays
            print(
                f"memory: {loaded >> 20} MiB with {model}, {held >> 20} without: {(held - before) >> 20} more"
            )


async def _switch(here: Address, num_rounds: int) -> None:
    times_s, cpus_s = [], []
    for number in range(num_rounds + 1):
        await asyncio.sleep(_SPARE_S)
        status, seconds = await here.ask(NAMES[number % 2], max_tokens=1)
        assert status == 200, status
        times_s.append(seconds)
        cpus_s.append(here.engine_cpu_s())
    for what, found in (("wall", sorted(times_s[1:])), ("processor, of the new engine", sorted(cpus_s[1:]))):
        print(f"switch: {what}: median {found[len(found) // 2]:.2f} s, {found[0]:.2f} to {found[-1]:.2f}")


async def _pauses(here: Address, num_rounds: int) -> None:
    await here.ask("a")
    for kind in ("alone", "beside loads"):
        found: list[float] = []

        async def streams(found: list[float] = found) -> None:
            while True:
                found += await here.gaps("a", 400)

        streaming = asyncio.create_task(streams())
        for _ in range(num_rounds):
            if kind == "alone":
                await asyncio.sleep(3)
                continue
            await here.ask("b")
            await here.unload("b")
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)
        found.sort()
        p99 = found[int(len(found) * 0.99)]
        print(f"pauses: {kind}: {len(found)} gaps, p99 {p99 * 1e3:.1f} ms, longest {found[-1] * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="checkpoint for `switch`")
    parser.add_argument("--part", default=",".join(_PARTS))
    options = parser.parse_args()
    demo = dict.fromkeys(NAMES, DEMO_MODEL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = options.part.split(",")
        if "turns" in parts:
            with serving(folder, demo, num_that_fit=1) as here:
                asyncio.run(_turns(here, options.requests, options.clients))
        if "memory" in parts:
            with serving(folder, demo, num_that_fit=1) as here:
                asyncio.run(_memory(here, options.rounds))
        if "switch" in parts:
            with serving(folder, dict.fromkeys(NAMES[:2], options.model), num_that_fit=1) as here:
                asyncio.run(_switch(here, options.rounds * 2))
        if "pauses" in parts:
            with serving(folder, demo, num_that_fit=3) as here:
                asyncio.run(_pauses(here, options.rounds))


if __name__ == "__main__":
    main()
