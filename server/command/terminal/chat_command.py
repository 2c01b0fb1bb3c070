"""`tokenyard chat`: a conversation with a running server, at a terminal or through a pipe.

Owns: the conversation, the commands that begin with a slash, and what Ctrl-C means.
Never: HTTP (http_client.py), or a file: the history of lines is gone with the session.

Codes: 0 the person left, 1 the server refused, 2 a mistake on the command line, 69 there is no server,
130 interrupted (of a piped message).
"""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from server.command.terminal.client import (
    Failed,
    GeneratingParser,
    ReplyStats,
    TokenWriter,
    harmless,
    run_client,
    sampling_of,
    say,
    served_model,
    stream,
    target_of,
)
from server.edge.http.http_client import ExchangeFailed, Target

_PROMPT = "> "
_MORE = "... "
_FENCE = re.compile(r"\s*(?P<mark>`{3,}(?=[^`]*$)|~{3,})(?P<behind>.*)")
_HELP = """\
  /reset           forget the conversation
  /system TEXT     set the system message and begin anew; without TEXT: show it
  /stats           tokens and speed of the last reply
  /exit            leave (as Ctrl-D does)
A line that ends with \\ goes on in the next one. Ctrl-C stops a reply; the conversation goes on."""


class Conversation:
    """The messages so far, and the server that answers them."""

    def __init__(self, target: Target, model: str, fields: dict[str, Any], system: str | None) -> None:
        self._target = target
        self.model = model
        self._fields = {"model": model, **fields}
        self.system = system
        self._turns: list[dict[str, str]] = []
        self.last_stats: ReplyStats | None = None

    def reset(self) -> None:
        self._turns.clear()

    async def answer(self, text: str) -> None:
        """Send `text` and write the reply as it comes. Raises Failed, ExchangeFailed, with `text` forgotten.

        Cancelled, it keeps what there is of the reply.
        """
        question = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {**self._fields, "messages": [*system, *self._turns, question]}
        stats = self.last_stats = ReplyStats(started_s=time.perf_counter())
        said: list[str] = []
        is_screen = sys.stdout.isatty() and Console().is_interactive  # which variables may claim of a pipe
        writer = MarkdownWriter(sys.stdout) if is_screen else TokenWriter(sys.stdout)
        try:
            async with aclosing(stream(self._target, "/v1/chat/completions", body)) as chunks:
                async for chunk in chunks:
                    said.append(_show(chunk, writer, stats))
        except (Failed, ExchangeFailed):
            if stats.first_token_s is not None:
                writer.close()
            raise
        except asyncio.CancelledError:
            self._keep(question, said)
            writer.close()
            raise
        self._keep(question, said)
        writer.close()

    def _keep(self, question: dict[str, str], said: list[str]) -> None:
        self._turns += [question, {"role": "assistant", "content": "".join(said)}]


class MarkdownWriter(TokenWriter):
    """Writes on a terminal: whole parts as Markdown, and the last rows of a part while it comes."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._console = Console(file=stream)
        self._live = Live(console=self._console)
        self._lines: list[str] = []
        self._line = ""
        self._fence: re.Match[str] | None = None
        """The line that opened the code block in which the text is."""

    def write(self, text: str) -> None:
        self._leave_dim()
        if not self._live.is_started:
            self._live = Live(self, console=self._console, refresh_per_second=10, transient=True)
            self._live.start()
        *lines, self._line = (self._line + harmless(text)).split("\n")
        for line in lines:
            if line.strip() or self._fence:
                self._lines.append(line)
                self._take_fence(line)
            else:
                self._print_part()

    def write_reasoning(self, text: str) -> None:
        self._end_text()
        super().write_reasoning(text)

    def close(self) -> None:
        self._end_text()
        self._leave_dim()
        self._stream.flush()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as much of the part as the terminal has room for, at the rate of Live."""
        num_rows = max(1, options.size.height - 1)
        shown = [*self._lines[-num_rows:], self._line]
        if self._fence and self._fence.string not in shown:
            shown.insert(0, self._fence.string)
        for row in console.render_lines(_markdown(shown), options)[-num_rows:]:
            yield from (*row, Segment.line())

    def _take_fence(self, line: str) -> None:
        found = _FENCE.match(line)
        if not self._fence:
            self._fence = found
        elif found and not found["behind"].strip() and found["mark"].startswith(self._fence["mark"]):
            self._fence = None

    def _print_part(self) -> None:
        part, self._lines = self._lines, []
        if any(part):
            self._console.print(_markdown(part), "")

    def _end_text(self) -> None:
        self._lines, self._line, self._fence = [*self._lines, self._line], "", None
        self._live.stop()
        self._print_part()


def _markdown(lines: list[str]) -> Markdown:
    """Text as Markdown, in which no character that an entity names is a command either."""
    made = Markdown("\n".join(lines), hyperlinks=False)
    tokens = list(made.parsed)
    while tokens:
        token = tokens.pop()
        token.content = harmless(token.content)
        tokens += token.children or ()
    return made


def _show(chunk: dict[str, Any], writer: TokenWriter, stats: ReplyStats) -> str:
    """Write what a chunk adds, and return its share of the answer."""
    if chunk.get("usage"):
        stats.take_usage(chunk["usage"])
    text = ""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if delta.get("reasoning_content"):
            stats.take_time()
            writer.write_reasoning(delta["reasoning_content"])
        if delta.get("content"):
            stats.take_time()
            writer.write(delta["content"])
            text += delta["content"]
    return text


def main(words: Sequence[str]) -> int:
    """Run the command with the words behind it; returns the exit code. Raises OptionError."""
    options = build_parser().parse_args(list(words))
    target = target_of(options)
    with asyncio.Runner() as runner:

        def converse() -> None:
            model = runner.run(served_model(target, options.model))
            conversation = Conversation(target, model.name, sampling_of(options), options.system)
            if sys.stdin.isatty():
                _talk(runner, conversation, options)
            else:
                runner.run(conversation.answer(sys.stdin.read()))
                _show_stats(conversation, options)

        return run_client("tokenyard chat", converse)


def _talk(runner: asyncio.Runner, conversation: Conversation, options: argparse.Namespace) -> None:
    """Read messages and answer them until /exit or the end of the input."""
    # Its import gives input() a history and the keys that people expect.
    import readline  # noqa: F401

    say(f"{conversation.model} at {options.base_url}; /help tells what else can be typed")
    while (line := _read_message()) is not None:
        try:
            if line.startswith("/"):
                if not _obey(line, conversation):
                    return
            elif line.strip():
                runner.run(conversation.answer(line))
                _show_stats(conversation, options)
        except KeyboardInterrupt:
            say("(stopped)")
        except (Failed, ExchangeFailed) as error:
            say(f"({error})")


def _read_message() -> str | None:
    """Read one message, of several lines if all but the last end with a backslash; None to leave."""
    lines: list[str] = []
    while True:
        try:
            line = input(_MORE if lines else _PROMPT)
        except EOFError:
            say("")
            return None
        except KeyboardInterrupt:  # as in a shell: the line is dropped
            say("")
            lines.clear()
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _obey(line: str, conversation: Conversation) -> bool:
    """Whether the conversation goes on."""
    command, _, text = line.partition(" ")
    match command:
        case "/exit" | "/quit":
            return False
        case "/reset":
            conversation.reset()
            say("(the conversation is forgotten)")
        case "/system" if text.strip():
            conversation.system = text.strip()
            conversation.reset()
            say("(a new conversation begins)")
        case "/system":
            say(conversation.system or "(there is no system message)")
        case "/stats":
            say(f"({conversation.last_stats or 'no reply yet'})")
        case "/help":
            say(_HELP)
        case _:
            say(f"there is no command {command}; /help lists them")
    return True


def _show_stats(conversation: Conversation, options: argparse.Namespace) -> None:
    if options.stats:
        say(f"({conversation.last_stats})")


def build_parser() -> GeneratingParser:
    parser = GeneratingParser(
        prog="tokenyard chat",
        usage="tokenyard chat [--base-url URL] [--model NAME] [--system TEXT] [options]",
        description="Talk to a running server. What comes through a pipe is one message.",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    return parser
