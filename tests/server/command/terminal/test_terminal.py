"""`tokenyard chat` and `tokenyard complete`: at a real terminal, and through pipes."""

import asyncio
import fcntl
import io
import os
import pty
import sys
import termios
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from server.app import build_app
from server.command.terminal.chat_command import MarkdownWriter
from tests.server.conftest import Settings, eventually, serving

ROOT = Path(__file__).resolve().parents[4]
WAIT_S = 20.0
NOBODY = "http://127.0.0.1:9"


class Terminal:
    """A person's side of a terminal in which a command runs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""
        self._news = asyncio.Event()

    def read(self) -> None:
        try:
            self._seen += os.read(self._descriptor, 65536).decode(errors="replace")
        except OSError:  # the command has ended
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._news.set()

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def until(self, text: str) -> str:
        """Output up to and with `text`; it is then taken as read."""
        async with asyncio.timeout(WAIT_S):
            while text not in self._seen:
                await self._news.wait()
                self._news.clear()
        before, _, self._seen = self._seen.partition(text)
        return before + text

    async def interrupt(self, answer: str) -> None:
        """Drop a line that was begun with Ctrl-C, as often as it takes.

        Python's input() hears a signal while it waits for a key, not in the moment before.
        """
        self.type("too")
        await self.until("too")
        async with asyncio.timeout(WAIT_S):
            while answer not in self._seen:
                self.type("\x03")
                for _ in range(40):
                    if answer not in self._seen:
                        await asyncio.sleep(0.05)
            while answer in self._seen:  # a second signal, heard late, would drop the next line as well
                self._seen = self._seen.rpartition(answer)[2]
                await asyncio.sleep(0.2)

    async def ask(self, text: str, answer: str) -> str:
        """Type a line at the prompt, and wait for something to come back."""
        await self.until("> ")
        self.type(f"{text}\n")
        return await self.until(answer)


@asynccontextmanager
async def at_a_terminal(*words: str) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    ours, theirs = pty.openpty()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "server", *words),
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)
    terminal = Terminal(ours)
    asyncio.get_running_loop().add_reader(ours, terminal.read)
    try:
        yield terminal, child
        await asyncio.wait_for(child.wait(), WAIT_S)
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        if child.returncode is None:
            child.kill()
            await child.wait()
        os.close(ours)


async def through_pipes(*words: str, text: str | bytes = "") -> tuple[int, str, str]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "server", *words),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    piped = text if isinstance(text, bytes) else text.encode()
    out, err = await asyncio.wait_for(child.communicate(piped), WAIT_S)
    return child.returncode or 0, out.decode(), err.decode()


async def test_an_empty_pipe_is_no_prompt(url):
    code, out, err = await through_pipes("complete", "--base-url", url)
    assert (code, out) == (2, "")
    assert "the input is empty" in err


async def test_a_conversation_goes_on_until_it_is_reset(url, engine):
    async with at_a_terminal("chat", "--base-url", url, "--max-tokens", "2", "--system", "x") as (
        terminal,
        child,
    ):
        await terminal.ask("ab", "XA")
        await terminal.ask("cd", "XA")
        assert [message["content"] for message in engine.chats[-1][0]] == ["x", "ab", "XA", "cd"]
        await terminal.ask("/reset", "forgotten")
        await terminal.ask("/system be brief", "new conversation")
        await terminal.ask("ef", "BE")
        assert [message["content"] for message in engine.chats[-1][0]] == ["be brief", "ef"]
        await terminal.until("> ")
        terminal.type("/exit\n")
    assert child.returncode == 0


async def test_a_line_that_ends_with_a_backslash_goes_on(url, engine):
    async with at_a_terminal("chat", "--base-url", url, "--max-tokens", "1") as (terminal, child):
        await terminal.ask("one\\", "... ")
        terminal.type("two\n")
        await terminal.until("O")
        await terminal.until("> ")
        assert engine.chats[-1][0][0]["content"] == "one\ntwo"
        terminal.type("\x04")
    assert child.returncode == 0


async def test_ctrl_c_stops_the_reply_and_the_conversation_goes_on(url, engine):
    engine.stall_after = 2
    async with at_a_terminal("chat", "--base-url", url, "--max-tokens", "5") as (terminal, child):
        await terminal.ask("hello", "HE")
        terminal.type("\x03")
        await terminal.until("(stopped)")
        await eventually(lambda: engine.num_running == 0)
        engine.stall_after = None
        await terminal.ask("go", "HELLO")
        assert [message["content"] for message in engine.chats[-1][0]] == ["hello", "HE", "go"]
        await terminal.until("> ")
        terminal.type("dropped\\\n")
        await terminal.until("... ")
        await terminal.interrupt("> ")
        terminal.type("on\n")
        await terminal.until("HELLO")
        assert engine.chats[-1][0][-1]["content"] == "on"
        await terminal.until("> ")
        terminal.type("/exit\n")
    assert child.returncode == 0


async def test_numbers_about_a_reply_are_shown_on_request(url):
    async with at_a_terminal("chat", "--base-url", url, "--max-tokens", "3") as (terminal, _):
        await terminal.ask("/stats", "no reply yet")
        await terminal.ask("hi", "HIH")
        shown = await terminal.ask("/stats", "tokens/s")
        assert "2 prompt and 3 output tokens; first token after" in shown
        await terminal.ask("/what", "there is no command /what")
        await terminal.until("> ")
        terminal.type("/exit\n")


async def test_the_text_of_a_model_cannot_command_the_terminal(url, engine):
    engine.texts = ("a\x1b[2J", "b")
    async with at_a_terminal("chat", "--base-url", url, "--max-tokens", "2") as (terminal, _):
        shown = await terminal.ask("hi", "b")
        assert "\x1b[2J" not in shown
        assert "a\ufffd[2Jb" in shown
        await terminal.until("> ")
        terminal.type("/exit\n")


async def test_a_refusal_is_told_and_the_message_was_not_said(url, engine):
    async with at_a_terminal("chat", "--base-url", url, "--max-tokens", "2") as (terminal, _):
        await terminal.ask("x" * 300, "context window")
        await terminal.ask("hi", "HI")
        assert [message["content"] for message in engine.chats[-1][0]] == ["hi"]
        await terminal.until("> ")
        terminal.type("/exit\n")


async def test_a_piped_message_is_answered_once_whatever_the_variables_say(url, engine, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.setenv(name, "1")
    code, out, err = await through_pipes(
        "chat", "--base-url", url, "--max-tokens", "4", "--stats", text="a\nb\n"
    )
    assert (code, out) == (0, "A\nB\n\n")
    assert "4 prompt and 4 output tokens" in err
    assert engine.chats[-1][0][0]["content"] == "a\nb\n"


async def test_a_text_is_completed(url, engine):
    code, out, err = await through_pipes("complete", "abc", "--base-url", url, "--max-tokens", "3")
    assert (code, out, err) == (0, "ABC\n", "")
    assert (await through_pipes("complete", "--base-url", url, "--max-tokens", "2", text="xy"))[1] == "XY\n"
    code, out, _ = await through_pipes(
        "complete", "abc", "--base-url", url, "--temperature", "0", "--seed", "7"
    )
    assert engine.requests[-1].params.seed == 7
    assert engine.requests[-1].params.temperature == 0


@pytest.mark.parametrize("command", ["chat", "complete"])
async def test_without_a_server_it_is_told_how_to_start_one(command):
    code, out, err = await through_pipes(command, "--base-url", NOBODY, text="hi")
    assert (code, out) == (69, "")
    assert "tokenyard serve" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "text", "part"),
    [
        (("chat",), b"\xff", "utf-8"),
        (("complete",), b"\xff", "utf-8"),
        (("complete", "\udcff"), b"", "utf-8"),
        (("complete", "a", "--seed", "9" * 30), b"", "64-bit"),
    ],
)
async def test_what_cannot_be_sent_is_told_in_one_line(url, words, text, part):
    code, out, err = await through_pipes(*words, "--base-url", url, text=text)
    assert (code, out) == (1, "")
    assert part in err.lower()
    assert err.count("\n") == 1


async def test_a_key_is_asked_for_and_sent(engine):
    async with serving(build_app(engine, Settings(api_keys=("right",)))) as url:
        code, _, err = await through_pipes("complete", "a", "--base-url", url)
        assert code == 1
        assert "API key" in err
        code, out, _ = await through_pipes(
            "complete", "a", "--base-url", url, "--api-key", "right", "--max-tokens", "1"
        )
        assert (code, out) == (0, "A\n")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("chat", "--base-url", "ftp://h"), "expected http"),
        (("chat", "--temperature", "3"), "from 0 to 2"),
        (("chat", "--max-tokens", "0"), "from 1"),
        (("complete", "--nonsense"), "unrecognized"),
    ],
)
async def test_a_mistake_is_one_line_and_code_2(words, part):
    code, out, err = await through_pipes(*words)
    assert (code, out) == (2, "")
    assert part in err
    assert err.count("\n") == 1


def test_markdown_is_shown_part_by_part_and_once_and_no_character_is_a_command():
    out = io.StringIO()
    writer = MarkdownWriter(out)
    for piece in (
        "# Head\n\n",
        "- one\n- **t",
        "wo**\n\n",
        "```python\nx = 1\n\n",
        "y = 2\n```\n",
        "\x1b[2Jend",
    ):
        writer.write(piece)
        if "wo" in piece:
            assert "• two" in out.getvalue(), "a whole part does not wait for the end"
    writer.close()
    shown = out.getvalue()
    assert [shown.count(each) for each in ("Head", "one", "two", "x = 1", "y = 2", "end")] == [1] * 6
    assert "**" not in shown
    assert "\x1b" not in shown


def test_parts_are_torn_at_no_mark_inside_a_line_and_entities_are_no_commands():
    out = io.StringIO()
    writer = MarkdownWriter(out)
    for piece in (
        "a ``` in a line\n\n",
        "~~~~text\n\n**code**\n```\n~~~\n\n**still",
        "**\n~~~~\n\n",
        "&#82",
        "38;&#x202e;&rlm;&zwj;&#xE0041; **&lt;** `&lt;` [&#8238;](https://a.example/&#8238;)",
    ):
        writer.write(piece)
        assert "a ``` in a line" in out.getvalue()
    writer.close()
    shown = out.getvalue()
    assert "**code**" in shown
    assert "**still**" in shown
    assert "\ufffd\ufffd\ufffd\ufffd\ufffd < &lt; \ufffd (" in shown
    assert not set(shown) & set("\u202e\u200f\u200d\U000e0041")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "40", "LINES": "10"}.items():
        monkeypatch.setenv(name, value)
    return Screen()


def test_a_long_part_costs_few_redraws_of_its_last_rows(screen):
    writer = MarkdownWriter(screen)
    writer.write("```\n")
    for number in range(1000):
        writer.write(f"<{number}>\n")
    deadline_s = time.monotonic() + WAIT_S
    while "<999>" not in screen.getvalue() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert all(f"<{number}>" in screen.getvalue() for number in range(994, 1000)), "its end is in view"
    assert screen.getvalue().count("<") < 1000
    writer.close()
    assert screen.getvalue().count("<0>") <= 2


def test_reasoning_behind_a_piece_of_the_answer_is_written_below_it(screen):
    writer = MarkdownWriter(screen)
    for add, text in ((writer.write, "one"), (writer.write_reasoning, "why"), (writer.write, "two")):
        add(text)
    writer.close()
    before, _, behind = screen.getvalue().partition("why")
    assert "\x1b[?25h" in before, "the live rows are gone"
    assert before.rpartition("one")[2].split() == ["\x1b[2m"]
    assert "one" not in behind
    assert "two" in behind
