"""The rounds inside the guest: what a server sees and does in a control group whose memory is limited.

    python -m campaigns.control_groups.group_rounds VERSION [ROUND...]

Prints a line for each thing that was promised, `OK` or `FAULT` before it, and lines of what was seen.

Owns: the rounds and their judgement. Nothing in them depends on how long anything takes.
Never: runs outside of the guest.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from campaigns.control_groups.group_asking import Ending, ask, health, served_in, stream, until
from campaigns.control_groups.memory_groups import MIB, Group, badness, kills_told, make_group, name_of
from campaigns.servers.own_server import OwnServer, total
from campaigns.servers.running import PeerFailed, last_line

LIMIT_BYTES = 768 * MIB
_NEIGHBOUR_MIB = 96
"""Far less than an engine process: whatever the neighbours hold together, none of them is the largest."""
_MOST_NEIGHBOURS = LIMIT_BYTES // MIB // _NEIGHBOUR_MIB
_LONG, _SHORT = 1900, 8
_NUM_STREAMS = 2
_MAX_USE = 0.8
_SERVE = ("--num-threads", "1")
_SIZES = {"MiB": MIB, "GiB": 1024 * MIB}
_KILLED = r"the kernel has killed \d+ process\(es\) of this control group for want of memory"


Streams = list["asyncio.Task[Ending]"]


def seen(text: str) -> None:
    """Print what was seen, without a judgement."""
    for line in text.splitlines():
        print(f"      {line}", flush=True)


def promised(what: str, is_so: bool, otherwise: object = "") -> None:  # noqa: FBT001  # as in `assert`
    """Print whether what is promised is so."""
    print(f"OK    {what}" if is_so else f"FAULT {what}: {otherwise}", flush=True)


def size_in(pattern: str, text: str) -> float:
    """Read the bytes of a size in a text; 0 where there is none."""
    found = re.search(pattern.replace("SIZE", r"([\d.]+) (MiB|GiB)"), text)
    return float(found[1]) * _SIZES[found[2]] if found else 0.0


async def doctor(group: Group) -> None:
    """Ask what the server would find in the group, and outside."""
    for where in ("outside of the group", "in the group"):
        words = [sys.executable, "-m", "server", "doctor"]
        command = group.entry(*words) if where == "in the group" else words
        done = await asyncio.to_thread(
            subprocess.run, command, stdout=subprocess.PIPE, text=True, check=False
        )
        lines = [line for line in done.stdout.splitlines() if re.match(r"\S+ +(device|memory) ", line)]
        seen(f"doctor {where}:\n" + "\n".join(lines))
        available = size_in("SIZE of memory available", done.stdout)
        cache = size_in("KV cache up to SIZE", done.stdout)
        if where != "in the group":
            promised("doctor outside sees more than the limit", available > LIMIT_BYTES, available)
            continue
        is_limited = LIMIT_BYTES / 2 < available <= LIMIT_BYTES
        promised(f"doctor in a group of {LIMIT_BYTES // MIB} MiB says what it leaves", is_limited, available)
        promised("doctor names the group's limit", "control group" in done.stdout, "not a word of it")
        is_quarter = LIMIT_BYTES / 8 < cache <= LIMIT_BYTES / 4
        promised("the KV cache is sized by what the group leaves", is_quarter, cache)


async def high(group: Group) -> None:
    """Ask what the server would find where memory.high is below the limit; version 2."""
    group.make_wait_beyond(LIMIT_BYTES // 2)
    code = "from worker.machine import available_memory_bytes; print(available_memory_bytes())"
    words = group.entry(sys.executable, "-c", code)
    done = await asyncio.to_thread(subprocess.run, words, stdout=subprocess.PIPE, text=True, check=False)
    group.make_wait_beyond(None)
    is_limited = LIMIT_BYTES / 4 < int(done.stdout or 0) <= LIMIT_BYTES / 2
    promised("memory.high counts as a limit", is_limited, done.stdout)


async def crowd_out(group: Group, neighbours: contextlib.AsyncExitStack) -> None:
    """Start neighbours in the group, one after the other, until the kernel has killed."""
    before = group.num_killed()
    largest = sorted(group.pids(), key=badness, reverse=True)
    seen("the killer's order: " + ", ".join(f"{name_of(pid)} {badness(pid)}" for pid in largest))
    for number in range(_MOST_NEIGHBOURS):
        await neighbours.enter_async_context(group.held(_NEIGHBOUR_MIB))
        seen(f"{number + 1} neighbours of {_NEIGHBOUR_MIB} MiB: {group.used_bytes() >> 20} MiB in use")
        if group.num_killed() > before:
            seen(f"the kernel has killed {group.num_killed() - before}")
            return


async def begin(server: OwnServer) -> tuple[Streams, list[Ending]]:
    """Begin long streams; return them once each has a token."""
    endings = [Ending() for _ in range(_NUM_STREAMS)]
    streams = [asyncio.create_task(stream(server.target, _LONG, ending)) for ending in endings]
    await asyncio.gather(*(ending.begun.wait() for ending in endings))
    return streams, endings


async def leave(streams: Streams) -> None:
    """Hang up."""
    for each in streams:
        each.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


async def judge_death(group: Group, server: OwnServer, kill: Callable[[], Awaitable[None]]) -> None:
    """Judge what follows when the kernel kills while streams run and a request waits."""
    streams, _ = await begin(server)
    first = server.engine_pid
    waiting = asyncio.create_task(ask(server.target, _SHORT))

    async def is_in_line() -> bool:
        return total(await server.metrics(), "tokenyard:num_requests_waiting") > 0

    promised("a request waits in line", await until(is_in_line), waiting)
    size, num_told = server.log.stat().st_size, len(kills_told())
    await kill()
    told = "\n".join(kills_told()[num_told:])
    seen(told)
    promised("the kernel chose the engine process", f"Killed process {first} " in told, told)
    endings = await asyncio.gather(*streams)
    page = await health(server.target)
    seen("streams: " + "; ".join(map(str, endings)))
    once = all(each.errors == ["engine_restarted"] and not each.is_whole for each in endings)
    is_said = once and not any(each.broken for each in endings)
    promised("what had begun ended with one error", is_said, list(map(str, endings)))
    seen(f"/health: {page}")
    promised("/health says that the kernel has killed", bool(re.search(_KILLED, str(page))), page)
    log = server.log.read_text(errors="replace")[size:]
    lines = [line for line in log.splitlines() if re.search(_KILLED, line)]
    seen("\n".join(lines) or "\n".join(log.splitlines()[-8:]))
    promised("the log says so", bool(lines), "not a word of it")
    status, code = await waiting
    promised("what waited was served by the next engine", status == 200, (status, code))
    again = (await ask(server.target, _SHORT))[0] == 200 and server.engine_pid not in (None, first)
    promised("a new engine process serves", again, server.engine_pid)
    promised("the API process is the same", server.pid in group.pids(), group.pids())


async def killed(group: Group) -> None:
    """Let the kernel kill for want of memory in the group, in the ways in which that happens."""
    async with served_in(group, *_SERVE, "--max-num-seqs", str(_NUM_STREAMS)) as server:
        async with contextlib.AsyncExitStack() as neighbours:

            async def by_neighbours() -> None:
                await crowd_out(group, neighbours)
                await neighbours.aclose()

            seen("-- neighbours fill the group")
            await judge_death(group, server, by_neighbours)
        if group.version == 1:  # refuses a limit below what is in use, and kills nobody
            return

        async def by_limit() -> None:
            before = group.num_killed()
            group.set_limit(int(group.used_bytes() * 0.8))
            seen(f"the kernel has killed {group.num_killed() - before} under the lower limit")
            group.set_limit(LIMIT_BYTES)

        seen("-- the limit is lowered beneath what is in use")
        await judge_death(group, server, by_limit)


async def together(group: Group) -> None:
    """Let the kernel end the whole group at once; then start again."""
    group.end_together()
    num_told = len(kills_told())
    async with contextlib.AsyncExitStack() as neighbours:
        with contextlib.suppress(PeerFailed):
            async with served_in(group, *_SERVE) as server:
                streams, _ = await begin(server)
                await crowd_out(group, neighbours)
                endings = await asyncio.gather(*streams)
                seen("\n".join(kills_told()[num_told:]))
                seen("streams: " + "; ".join(map(str, endings)))
                are_broken = all(each.broken and not each.is_whole for each in endings)
                promised("with memory.oom.group streams break off", are_broken, list(map(str, endings)))

                async def is_empty() -> bool:
                    return not group.pids()

                promised("no process of the group is left", await until(is_empty), group.pids())
                status, text = await ask(server.target, _SHORT)
                promised("nothing answers at the port", status == 0, (status, text))
                seen(f"its log ends with: {last_line(server.log)}")
    left = [path.name for path in Path("/dev/shm").iterdir()] + [path.name for path in Path("/tmp").iterdir()]
    seen(f"left in /dev/shm and /tmp: {left}")
    async with served_in(group, *_SERVE) as server:
        answer = await ask(server.target, _SHORT)
        promised("a fresh start serves again", answer[0] == 200, answer)
        left = [path.name for path in Path("/tmp").iterdir() if path.name in left]
        seen(f"of it left after the fresh start: {left}")


async def nearly_full(group: Group) -> None:
    """Fill the group to beyond --max-memory-use, and no further."""
    async with served_in(group, *_SERVE, "--max-memory-use", str(_MAX_USE)) as server:
        log = server.log.read_text(errors="replace")
        loaded = next((line for line in log.splitlines() if "KV cache" in line), "")
        seen(loaded)
        cache = size_in("KV cache SIZE", loaded)
        promised("the start sizes the KV cache so too", LIMIT_BYTES / 8 < cache <= LIMIT_BYTES / 4, cache)
        before, middle = group.num_killed(), (_MAX_USE + 1) / 2
        streams, endings = await begin(server)
        async with contextlib.AsyncExitStack() as neighbours:
            while (missing := middle * LIMIT_BYTES - group.used_bytes()) > 0:
                num_mib = min(_NEIGHBOUR_MIB, max(1, int(missing / MIB)))
                await neighbours.enter_async_context(group.held(num_mib))
            seen(f"{group.used_bytes() / LIMIT_BYTES:.0%} of the limit are in use")
            await asyncio.sleep(2)  # memory is measured once a second
            answer = await ask(server.target, _SHORT)
            promised("a new request gets 503 low_memory", answer == (503, "low_memory"), answer)
            page = await health(server.target)
            promised("probes are answered", page.get("status") == "ok", page)
            num_texts = [ending.num_texts for ending in endings]

            async def go_on() -> bool:
                now = (ending.num_texts for ending in endings)
                return all(num > then + _SHORT for num, then in zip(now, num_texts, strict=True))

            goes_on = await until(go_on)
            seen("streams: " + "; ".join(map(str, endings)))
            is_fine = goes_on and not any(each.errors or each.broken for each in endings)
            promised("what had begun goes on", is_fine, list(map(str, endings)))
            await leave(streams)

        async def is_served() -> bool:
            return (await ask(server.target, _SHORT))[0] == 200

        promised("it serves again once there is memory", await until(is_served), "it never did")
        promised("the kernel has killed nobody", group.num_killed() == before, group.num_killed() - before)


ROUNDS = {"doctor": doctor, "high": high, "killed": killed, "nearly_full": nearly_full, "together": together}
"""In this order: a group that ends together stays one."""
_NOT_OF_VERSION_1 = ("high", "together")


async def run(version: int, names: Sequence[str]) -> None:
    """Run rounds in a group of their own."""
    try:
        group = make_group(version)
    except OSError as error:
        print(f"SKIP  version {version}: the kernel has no such controller ({error})", flush=True)
        return
    group.set_limit(LIMIT_BYTES)
    for name in names or ROUNDS:
        if name in _NOT_OF_VERSION_1 and version == 1:
            continue
        print(f"----- control groups of version {version}: {name}", flush=True)
        await ROUNDS[name](group)


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2:]))
    print("----- done", flush=True)
