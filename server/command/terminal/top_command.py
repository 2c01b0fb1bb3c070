"""`tokenyard top`: the lines, the blocks, the steps and the models of a running server, as they change.

Owns: the options of the command, and what it does when the stream of views ends.

Codes: 0 the person left, 1 the server refused, 2 a mistake on the command line, 69 there is no server.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import orjson
from rich.console import Console
from rich.live import Live

from server.command.terminal.client import (
    EXIT_INTERRUPTED,
    Failed,
    Parser,
    reason_of,
    run_client,
    say,
    target_of,
)
from server.command.terminal.top_screen import Recent, screen
from server.edge.http.http_client import Target, fetch, open_stream

_PATH = "/admin/events"
_SILENCE_S = 30.0
"""A server breaks every silence after 2 seconds."""
_REFRESHES_PER_S = 4
_SECOND_S = 1.0
_POLL_S = 2.0
"""Time after which the list of models is asked for again."""
_MAX_ROWS = 30
_OTHER_LINES = 18


def main(words: Sequence[str]) -> int:
    """Run the command with the words behind it; returns the exit code. Raises OptionError."""
    options = build_parser().parse_args(list(words))
    target = target_of(options)
    path = _PATH + (f"?model={quote(options.model, safe='')}" if options.model else "")
    code = run_client("tokenyard top", lambda: asyncio.run(_run(target, path, options)))
    return 0 if code == EXIT_INTERRUPTED else code  # Ctrl-C is the way to leave


def build_parser() -> Parser:
    parser = Parser(
        prog="tokenyard top",
        usage="tokenyard top [options]",
        description="Show what a running server does: who runs, who waits and why, blocks and steps. "
        "It needs a key that may administer; without keys the server must listen on a loopback address or "
        "have --enable-admin. Ctrl-C leaves.",
        allow_abbrev=False,
    )
    parser.add_server("the server, or its admin port")
    parser.add_argument("--model", metavar="NAME", help="which model (default: the first that it serves)")
    parser.add_argument("--load", metavar="NAME", help="first load this model, one of those that come and go")
    parser.add_argument("--unload", metavar="NAME", help="first unload this model")
    parser.add_argument("--once", action="store_true", help="show one view and leave")
    return parser


async def _run(target: Target, path: str, options: argparse.Namespace) -> None:
    for verb, name in (("unload", options.unload), ("load", options.load)):
        if name is not None:
            body = orjson.dumps({"model": name})
            reply = await fetch(target, "POST", f"/models/{verb}", body, silence_s=_SILENCE_S)
            if reply.status != 200:
                raise Failed(reason_of(reply))
    await (_once if options.once else _watch)(target, path)


async def _once(target: Target, path: str) -> None:
    """Show the last of the views of one second. Raises Failed if there is none, ExchangeFailed."""
    recent, console = Recent(), Console(file=sys.stdout)
    began_s: float | None = None
    try:
        async with asyncio.timeout(_SILENCE_S), aclosing(_views(target, path)) as views:
            async for view in views:
                await _take(recent, view, target)
                began_s = view["time_s"] if began_s is None else began_s
                if view["time_s"] - began_s >= _SECOND_S:
                    break
    except TimeoutError:
        raise Failed(f"there was no view in {_SILENCE_S:g} s: is the model loaded?") from None
    console.print(screen(recent, target.url, max_rows=_MAX_ROWS))


async def _watch(target: Target, path: str) -> None:
    """Show views until the stream ends. Raises Failed, ExchangeFailed."""
    recent = Recent()
    console = Console()
    with Live(console=console, screen=sys.stdout.isatty(), refresh_per_second=_REFRESHES_PER_S) as live:
        async with aclosing(_views(target, path)) as views:
            async for view in views:
                await _take(recent, view, target)
                max_rows = max((console.height - _OTHER_LINES) // 2, 3)
                live.update(screen(recent, target.url, max_rows=min(max_rows, _MAX_ROWS)))
    say("tokenyard top: the server has ended the stream: it is stopping")


async def _take(recent: Recent, view: dict[str, Any], target: Target) -> None:
    """Take a view in, and the list of models once in a while. Raises ExchangeFailed."""
    recent.take(view)
    if 0.0 <= view["time_s"] - recent.listed_s < _POLL_S:  # another engine may have another clock
        return
    reply = await fetch(target, "GET", "/models", silence_s=_SILENCE_S)
    listed = orjson.loads(reply.body)["data"] if reply.status == 200 else ()
    recent.models = [each for each in listed if each.get("status")]
    recent.listed_s = view["time_s"]


async def _views(target: Target, path: str) -> AsyncGenerator[dict[str, Any], None]:
    async with open_stream(target, "GET", path, b"", silence_s=_SILENCE_S) as reply:
        async for data in reply.events():
            view = orjson.loads(data)
            if isinstance(view, dict) and "stats" in view:
                yield view
        whole = await reply.whole()
        if whole.status == 404:
            raise Failed(
                "this server does not show its yard here: see --page, --enable-admin and --admin-port"
            )
        if whole.status != 200:
            raise Failed(reason_of(whole))
