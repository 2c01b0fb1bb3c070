"""The part that chat and complete share: the server they talk to, and a reply shown while it comes.

Owns: the options about the server, the words for what went wrong, the numbers about a reply, and that a
model's text cannot move the cursor.
"""

import argparse
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

import orjson

from engine.options.options import OptionError
from engine.options.values import Count
from server.command.command_line import valued
from server.edge.http.http_client import (
    DEFAULT_URL,
    ExchangeFailed,
    Reply,
    Target,
    fetch,
    key_from_environment,
    open_stream,
)

EXIT_FAILED = 1
EXIT_NO_SERVER = 69
EXIT_INTERRUPTED = 130
_SILENCE_S = 120.0
"""Longer than --stream-keep-alive by default, after which a server of ours breaks a silence."""
_TOKENS = Count(low=1, high=2**31 - 1)
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Failed(Exception):
    """The server said no. One line for the person."""


@dataclass(slots=True)
class ReplyStats:
    started_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def take_time(self) -> None:
        self.last_token_s = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s

    def take_usage(self, usage: Mapping[str, Any]) -> None:
        self.num_prompt_tokens = usage.get("prompt_tokens", 0)
        self.num_output_tokens = usage.get("completion_tokens", 0)

    def __str__(self) -> str:
        if self.first_token_s is None or self.last_token_s is None:
            return "no tokens"
        first_s = self.first_token_s - self.started_s
        decode_s = self.last_token_s - self.first_token_s
        rate = f", {(self.num_output_tokens - 1) / decode_s:,.1f} tokens/s" if decode_s > 0 else ""
        return (
            f"{self.num_prompt_tokens:,} prompt and {self.num_output_tokens:,} output tokens;"
            f" first token after {first_s:.2f} s{rate}"
        )


class TokenWriter:
    """Writes text as it comes. On a terminal reasoning is dim, and no character is a command to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._is_dim = False

    def write(self, text: str) -> None:
        self._leave_dim()
        self._put(text)

    def write_reasoning(self, text: str) -> None:
        """Write reasoning dim on a terminal, and not at all where a program reads the output."""
        if not self._is_terminal:
            return
        if not self._is_dim:
            self._is_dim = True
            self._stream.write(_DIM)
        self._put(text)

    def close(self) -> None:
        """Leaves a clean line behind."""
        self._leave_dim()
        self._stream.write("\n")
        self._stream.flush()

    def _leave_dim(self) -> None:
        if self._is_dim:
            self._is_dim = False
            self._stream.write(f"{_PLAIN}\n\n")

    def _put(self, text: str) -> None:
        self._stream.write(harmless(text) if self._is_terminal else text)
        self._stream.flush()


def harmless(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


async def stream(target: Target, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed reply. Raises Failed, ExchangeFailed; closing it stops the server's work."""
    try:
        asked = orjson.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    except orjson.JSONEncodeError as error:  # a word that is not UTF-8, a seed of more than 64 bits
        raise Failed(f"this cannot be sent: {error}") from None
    async with open_stream(target, "POST", path, asked, silence_s=_SILENCE_S) as reply:
        async for data in reply.events():
            if data == b"[DONE]":
                return
            chunk = _chunk_of(data)
            if "error" in chunk:
                raise Failed(_message(chunk) or "the server broke the reply off")
            yield chunk
        whole = await reply.whole()
        if whole.status != 200:
            raise Failed(reason_of(whole))


def _parsed(data: bytes) -> Any:
    """Parse JSON; None if it is none."""
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(data)
    return None


def _chunk_of(data: bytes) -> dict[str, Any]:
    chunk = _parsed(data)
    if not isinstance(chunk, dict):
        raise Failed("the server sent an event that is not a JSON object")
    return chunk


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts that a server gives about one of its models."""

    name: str
    max_model_len: int | None
    """The context window, in tokens; servers of other makes do not always tell."""


async def served_model(target: Target, name: str | None) -> ServedModel:
    """The model of this name, or the first that the server has. Raises Failed, ExchangeFailed."""
    reply = await fetch(target, "GET", "/v1/models", silence_s=_SILENCE_S)
    listed = _parsed(reply.body)
    if reply.status != 200:
        raise Failed(_message(listed) or f"{target.url} answers with status {reply.status}")
    models = {model.get("id"): model for model in _objects(listed)}
    chosen = name or next(iter(models), None)
    if not isinstance(chosen, str):
        raise Failed(f"{target.url} lists no model: is this an OpenAI-compatible server?")
    length = models.get(chosen, {}).get("max_model_len")
    return ServedModel(chosen, length if isinstance(length, int) else None)


def _objects(listed: Any) -> list[dict[str, Any]]:
    data = listed.get("data") if isinstance(listed, dict) else None
    return [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []


def reason_of(reply: Reply) -> str:
    return _message(_parsed(reply.body)) or f"the server answers with status {reply.status}"


def _message(body: Any) -> str | None:
    """The text of OpenAI's error object."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return harmless(str(message)) if message else None


def say(text: str) -> None:
    """Print a line for the person; it goes to stderr, apart from the model's text."""
    print(text, file=sys.stderr, flush=True)


def _no_server(error: ExchangeFailed) -> str:
    """The fault, and its remedy."""
    return (
        f"{error}.\nStart a server in another terminal with `tokenyard serve`, or name one that runs with"
        f" --base-url {DEFAULT_URL}"
    )


def run_client(command: str, work: Callable[[], None]) -> int:
    """Do the work of a command; return its exit code, after a line about the failure if there was one."""
    try:
        work()
    except (Failed, UnicodeDecodeError) as error:  # the latter of the pipe
        say(f"{command}: {error}")
        return EXIT_FAILED
    except ExchangeFailed as error:
        say(f"{command}: {_no_server(error)}")
        return EXIT_NO_SERVER
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


class Parser(argparse.ArgumentParser):
    """The words of one command. A mistake raises OptionError."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(self.prog, message, f"see `{self.prog} --help`")

    def add_server(self, place: str) -> None:
        """Add the options about the server; `place` says which one is asked."""
        self.add_argument(
            "--base-url",
            type=_url,
            default=DEFAULT_URL,
            metavar="URL",
            help=f"{place} (default: {DEFAULT_URL})",
        )
        self.add_argument(
            "--api-key",
            default="",
            metavar="KEY",
            help="its key (default: TOKENYARD_API_KEY, where that is set)",
        )


class GeneratingParser(Parser):
    """The options of the commands that show a reply."""

    def __init__(self, *, prog: str, usage: str, description: str) -> None:
        super().__init__(prog=prog, usage=usage, description=description, allow_abbrev=False)
        self.add_server("the server")
        self.add_argument("--model", metavar="NAME", help="which model (default: the first that it serves)")
        self.add_argument(
            "--max-tokens",
            type=valued(_TOKENS),
            metavar="N",
            help="end each reply after this number of tokens",
        )
        self.add_argument(
            "--temperature",
            type=_temperature,
            metavar="T",
            help="0 to 2; 0 is greedy (default: the model's own)",
        )
        self.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same reply")
        self.add_argument(
            "--stats", action="store_true", help="after each reply: tokens, speed, time to first token"
        )


def target_of(options: argparse.Namespace) -> Target:
    key = options.api_key or key_from_environment()
    return Target.parse(options.base_url, api_key=key)


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that were asked for."""
    names = ("max_tokens", "temperature", "seed")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _url(text: str) -> str:
    try:
        Target.parse(text, api_key="")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 2:
        raise argparse.ArgumentTypeError("must be a number from 0 to 2")
    return number
