"""`tokenyard complete PROMPT`: the continuation of a text by a running server.

Codes: 0 done, 1 the server refused, 2 a mistake on the command line, 69 there is no server, 130 interrupted.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from engine.options.options import OptionError
from server.command.terminal.client import (
    GeneratingParser,
    ReplyStats,
    TokenWriter,
    run_client,
    sampling_of,
    say,
    served_model,
    stream,
    target_of,
)
from server.edge.http.http_client import Target

_MAX_TOKENS = 256
"""Default, unless half of the context window is less. OpenAI's 16 would stop in the middle of a sentence."""


def main(words: Sequence[str]) -> int:
    """Run the command with the words behind it; returns the exit code. Raises OptionError."""
    options = build_parser().parse_args(list(words))
    target = target_of(options)

    def complete() -> None:
        prompt = options.prompt
        if prompt is None:
            if sys.stdin.isatty():
                raise OptionError("tokenyard complete", "there is no PROMPT", "give one, or pipe it in")
            prompt = sys.stdin.read()
            if not prompt:
                raise OptionError("tokenyard complete", "the input is empty", "pipe in a text, or give one")
        fields = {**sampling_of(options), "prompt": prompt}
        try:
            stats = asyncio.run(_complete(target, options.model, fields))
        except KeyboardInterrupt:
            say("")
            raise
        if options.stats:
            say(f"({stats})")

    return run_client("tokenyard complete", complete)


async def _complete(target: Target, name: str | None, fields: dict[str, Any]) -> ReplyStats:
    model = await served_model(target, name)
    room = _MAX_TOKENS if model.max_model_len is None else max(1, model.max_model_len // 2)
    body = {"model": model.name, "max_tokens": min(_MAX_TOKENS, room), **fields}
    stats = ReplyStats(started_s=time.perf_counter())
    writer = TokenWriter(sys.stdout)
    async with aclosing(stream(target, "/v1/completions", body)) as chunks:
        async for chunk in chunks:
            if chunk.get("usage"):
                stats.take_usage(chunk["usage"])
            for choice in chunk.get("choices") or ():
                if choice.get("text"):
                    stats.take_time()
                    writer.write(choice["text"])
    writer.close()
    return stats


def build_parser() -> GeneratingParser:
    parser = GeneratingParser(
        prog="tokenyard complete",
        usage="tokenyard complete [PROMPT] [--base-url URL] [--model NAME] [options]",
        description="Continue a text. Without PROMPT it is read from a pipe.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    return parser
