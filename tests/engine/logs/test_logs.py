"""The log of a process: one form, never in anybody's way, and nothing of what clients sent in it."""

import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from engine.errors import EngineDied, RequestRejected
from engine.logs import setup as logs_module
from engine.logs.lines import LogFormat, ProcessName, fields
from engine.logs.setup import LineWriter, Logs, num_dropped_lines

log = logging.getLogger("server.something")


class Pipe:
    """Pipe whose text is read only when asked for."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def read(self) -> str:
        """Read as much as is there."""
        data = b""
        while select.select([self.reading], [], [], 0.05)[0]:
            chunk = os.read(self.reading, 1 << 20)
            if not chunk:
                break
            data += chunk
        return data.decode()

    def close(self) -> None:
        for end in (self.reading, self.writing):
            with suppress(OSError):
                os.close(end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@contextmanager
def logging_to(
    pipe: Pipe,
    log_format: LogFormat = LogFormat.JSON,
    *,
    level: int = logging.INFO,
    process: ProcessName = ProcessName.API,
) -> Iterator[Logs]:
    with Logs(log_format, level=level, process=process, descriptor=pipe.writing) as logs:
        yield logs


def lines_of(pipe: Pipe) -> list[dict[str, object]]:
    return [json.loads(line) for line in pipe.read().splitlines()]


# The form of a line.


def test_a_line_of_json_has_its_facts_as_fields(pipe) -> None:
    with logging_to(pipe):
        log.info("met %s", "them", extra=fields(request_id="r-1", status=200, queue_s=None, tenant=""))
    (line,) = lines_of(pipe)
    assert line.pop("time").endswith("Z")  # type: ignore[attr-defined]
    assert line == {
        "level": "info",
        "process": "api",
        "pid": os.getpid(),
        "logger": "server.something",
        "message": "met them",
        "request_id": "r-1",
        "status": 200,
    }


def test_a_line_of_text_is_for_a_person(pipe) -> None:
    with logging_to(pipe, LogFormat.TEXT, process=ProcessName.ENGINE):
        log.warning("met them", extra=fields(route="/v1/x", words="a b", seconds=0.25))
    _, _, rest = pipe.read().split(" ", 2)
    assert (
        rest
        == f'WARNING engine[{os.getpid()}] server.something: met them route=/v1/x words="a b" seconds=0.25\n'
    )


def test_auto_is_json_where_nobody_looks_on(pipe) -> None:
    with logging_to(pipe, LogFormat.AUTO) as logs:
        assert not logs.is_text
    controlling, terminal = os.openpty()
    try:
        with Logs(LogFormat.AUTO, level=logging.INFO, process=ProcessName.API, descriptor=terminal) as logs:
            assert logs.is_text
            log.info("words")
        assert os.read(controlling, 4096).startswith(b"\r\x1b[K"), "a bar of progress may stand in the line"
    finally:
        os.close(terminal)
        os.close(controlling)


@pytest.mark.parametrize("log_format", [LogFormat.TEXT, LogFormat.JSON])
@pytest.mark.parametrize(
    "evil", ["a\nb", "a\r\nb", "a\x1b[2Jb", "a\x9bb", "a\u2028b", "a\u202eb", "a\x00b", "\ud800"]
)
def test_what_a_client_sends_cannot_make_a_line_or_move_a_cursor(pipe, log_format, evil) -> None:
    with logging_to(pipe, log_format):
        log.info("it said %s", evil, extra=fields(fact=evil))
    text = pipe.read()
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()


def test_a_long_message_is_cut(pipe) -> None:
    with logging_to(pipe):
        log.info("%s", "x" * 10**6)
    assert len(pipe.read()) < 10_000


# What an exception may say.


def raised(error: Exception) -> Exception:
    try:
        try:
            raise ValueError("marker of the cause")
        except ValueError as cause:
            raise error from cause
    except Exception as caught:  # noqa: BLE001 -- any
        return caught


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("marker"), ""),
        (KeyError("marker"), ""),
        (RequestRejected("marker: your words"), ""),
        (OSError(28, "No space left on device"), "No space left on device"),
        (EngineDied(), "engine"),
    ],
)
def test_in_the_api_process_an_exception_tells_its_stack_and_no_words_of_clients(pipe, error, words) -> None:
    with logging_to(pipe):
        log.error("it failed", exc_info=raised(error))
    (line,) = lines_of(pipe)
    stack = str(line["stack"])
    assert "marker" not in stack.replace('ValueError("marker of the cause")', "")  # our source, not its words
    assert type(error).__name__ in stack
    assert "test_logs.py" in stack
    assert stack.index("ValueError\n") < stack.index(type(error).__name__)
    assert words in stack.splitlines()[-1]


def test_in_the_engine_process_it_tells_all(pipe) -> None:
    with logging_to(pipe, process=ProcessName.ENGINE):
        log.error("it failed", exc_info=raised(RuntimeError("out of\nmemory")))
    (line,) = lines_of(pipe)
    assert str(line["stack"]).splitlines()[-1] == "RuntimeError: out of\\nmemory"


def test_a_mistake_in_a_call_costs_its_arguments_and_nothing_else(pipe) -> None:
    with logging_to(pipe):
        log.info("two %s %s", "marker")
        log.info("next")
    text = pipe.read()
    assert "marker" not in text
    assert [json.loads(line)["message"] for line in text.splitlines()] == [
        "a line could not be formed: two %s %s",
        "next",
    ]


# Who is heard.


def test_our_level_is_the_operators_and_libraries_are_heard_from_warning_on(pipe) -> None:
    with logging_to(pipe, level=logging.DEBUG):
        log.debug("ours")
        logging.getLogger("httpx").info("marker")
        logging.getLogger("httpx").warning("theirs")
    assert [line["message"] for line in lines_of(pipe)] == ["ours", "theirs"]


def test_a_thread_that_dies_is_told_in_the_same_form(pipe) -> None:
    def die() -> None:
        raise OSError("no more")

    with logging_to(pipe):
        thread = threading.Thread(target=die)
        thread.start()
        thread.join()
    (line,) = lines_of(pipe)
    assert line["level"] == "critical"
    assert str(line["stack"]).endswith("OSError: no more")


def test_afterwards_logging_is_as_it_was(pipe) -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level, threading.excepthook, logging.getLogger("server").level)
    with logging_to(pipe, level=logging.DEBUG):
        assert root.handlers != before[0]
    assert (root.handlers, root.level, threading.excepthook, logging.getLogger("server").level) == before
    assert num_dropped_lines() == 0


# A reader that does not read.


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def describe_loss(num_lines: int) -> bytes:
    return b"lost %d\n" % num_lines


def test_a_full_pipe_holds_up_nobody_and_what_is_lost_is_counted_and_told_in_its_place(pipe) -> None:
    writer = LineWriter(pipe.writing, describe_loss=describe_loss, max_pending_bytes=200_000)
    line = b"x" * 999 + b"\n"
    started_s = time.monotonic()
    for _ in range(1000):
        writer.put(line)
    assert time.monotonic() - started_s < 10.0
    num_lost = writer.num_dropped
    assert 500 < num_lost < 900  # the pipe takes 64 KiB, the queue the rest
    text = pipe.read()
    writer.put(b"after\n")
    writer.close(timeout_s=5)
    text += pipe.read()
    assert text.splitlines() == ["x" * 999] * (1000 - num_lost) + [f"lost {num_lost}", "after"]


def test_a_reader_that_never_reads_does_not_hold_the_end(pipe, monkeypatch) -> None:
    monkeypatch.setattr(logs_module, "_FLUSH_S", 0.1)
    started_s = time.monotonic()
    with logging_to(pipe) as logs:
        for _ in range(20_000):
            log.info("%s", "x" * 1000)
        assert logs.num_dropped > 1000
        assert num_dropped_lines() == logs.num_dropped
    assert time.monotonic() - started_s < 10.0
    os.close(pipe.reading)  # the thread is still there, and ends now
    until(lambda: not any(thread.name == "log" for thread in threading.enumerate()))


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    writer = LineWriter(full, describe_loss=describe_loss)
    try:
        writer.put(b"one\n")
        until(lambda: writer.num_dropped == 1)
        writer.put(b"two\n")
        until(lambda: writer.num_dropped >= 2)
    finally:
        writer.close(timeout_s=5)
        os.close(full)


def test_a_descriptor_that_does_not_block_is_waited_for(pipe) -> None:
    os.set_blocking(pipe.writing, False)
    writer = LineWriter(pipe.writing, describe_loss=describe_loss)
    for number in range(300):
        writer.put(b"%04d" % number + b"x" * 995 + b"\n")
    text = pipe.read()
    writer.close(timeout_s=5)
    text += pipe.read()
    assert [int(line[:4]) for line in text.splitlines()] == list(range(300))


def test_what_was_logged_before_the_end_is_written(pipe) -> None:
    with logging_to(pipe):
        for number in range(50):
            log.info("line %d", number)
    assert [line["message"] for line in lines_of(pipe)] == [f"line {number}" for number in range(50)]
