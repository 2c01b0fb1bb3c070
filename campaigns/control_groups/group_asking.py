"""Requests of a client in the guest, and how each of them ended.

Owns: the requests, their ends, and the server that is started inside a group.
Never: judges an end (group_rounds.py).
"""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from campaigns.control_groups.memory_groups import Group
from campaigns.servers.own_server import SERVED_NAME, OwnServer
from campaigns.servers.running import ROOT, Launch, running
from server.http.http_client import ExchangeFailed, Target, Timeouts, exchange, open_stream

_PORT = 8000
_PATIENCE_S = 1800.0
"""Seconds of the guest's own time: nothing here is about time, and an end that never comes is a fault."""
_POLL_S = 0.5


@dataclass(slots=True, kw_only=True)
class Ending:
    """The end of one stream."""

    num_texts: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    errors: list[str] = field(default_factory=list)
    """Codes of the error events, or of a refusal."""
    is_whole: bool = False
    """Whether it had its finish_reason and [DONE]."""
    broken: str = ""
    """Failure of the connection; empty without one."""

    def __str__(self) -> str:
        parts = [*self.errors, "whole" if self.is_whole else "", self.broken and f"broken ({self.broken})"]
        return f"{' and '.join(filter(None, parts)) or 'no end'} after {self.num_texts} pieces"


def _body(num_tokens: int, **fields: object) -> bytes:
    return orjson.dumps(
        {"model": SERVED_NAME, "prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, **fields}
    )


async def stream(target: Target, num_tokens: int, ending: Ending) -> Ending:
    """Read a stream to its end, and note each thing that it brings."""
    is_finished = False
    try:
        body = _body(num_tokens, stream=True)
        async with open_stream(target, "POST", "/v1/completions", body, silence_s=_PATIENCE_S) as reply:
            async for data in reply.events():
                if data == b"[DONE]":
                    ending.is_whole = is_finished
                    continue
                event = orjson.loads(data)
                if "error" in event:
                    ending.errors.append(str(event["error"]["code"]))
                    continue
                ending.num_texts += 1
                ending.begun.set()
                is_finished |= any(choice["finish_reason"] for choice in event["choices"])
            whole = await reply.whole()
            if whole.status != 200:
                ending.errors.append(_code_of(whole.body))
    except ExchangeFailed as failed:
        ending.broken = str(failed)
    return ending


def _code_of(body: bytes) -> str:
    """Read the code of an error's body; the body itself where there is none."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")


async def ask(target: Target, num_tokens: int) -> tuple[int, str]:
    """Ask for a whole reply; return its status, 0 without one, and the error's code or the failure's text."""
    wire = target.request("POST", "/v1/completions", _body(num_tokens))
    try:
        reply = await exchange(target, wire, timeouts=Timeouts(whole_s=_PATIENCE_S))
    except ExchangeFailed as failed:
        return 0, str(failed)
    return reply.status, "" if reply.status == 200 else _code_of(reply.body)


async def health(target: Target) -> dict[str, Any]:
    """Read /health; empty without an answer."""
    wire = target.request("GET", "/health")
    try:
        reply = await exchange(target, wire, timeouts=Timeouts(whole_s=_PATIENCE_S))
    except ExchangeFailed:
        return {}
    return dict(orjson.loads(reply.body))


async def until(is_so: Callable[[], Awaitable[bool]]) -> bool:
    """Wait until something is so; return False if it never is."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            while not await is_so():
                await asyncio.sleep(_POLL_S)
            return True
    return False


@contextlib.asynccontextmanager
async def served_in(group: Group, *words: str) -> AsyncIterator[OwnServer]:
    """`tokenyard serve` inside the group, ended when this is left. Raises PeerFailed."""
    serve = (*("-m", "server", "serve", "--port", str(_PORT)), "--served-model-name", SERVED_NAME, *words)
    command = tuple(group.entry(sys.executable, *serve))
    launch = Launch(command=command, variables={}, folder=ROOT, served_name=SERVED_NAME)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        starting = running(
            launch, port=_PORT, ready_path="/health/ready", log=log, ready_within_s=_PATIENCE_S
        )
        server = await asyncio.to_thread(starting.__enter__)
        try:
            target = Target.parse(f"http://127.0.0.1:{_PORT}")
            yield OwnServer(pid=server.pid, target=target, log=log)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)
