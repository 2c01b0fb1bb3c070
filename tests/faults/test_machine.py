"""Faults of the machine: it kills a server, sets its clock, takes its disk, descriptors and log reader."""

import contextlib
import fcntl
import json
import os
import re
import resource
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from campaigns.servers.free_ports import free_port
from tests.e2e.serving import ROOT, RunningServer, wait_for
from tests.engine.grammars.test_grammar_compiler import ENDLESS, used_ticks

pytestmark = pytest.mark.night

READY_WITHIN_S = 60
DAY_S = 86_400
PIPE_BYTES = 4096
"""The smallest there is."""
SERVE = (sys.executable, "-m", "server", "serve", "--num-threads", "1")
PATIENT = ("--grammar-compile-timeout", "60s")


def command_of(model: Path, port: int, *options: str) -> list[str]:
    return [*SERVE, "--port", str(port), *options, str(model)]


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which both servers of this port have theirs."""
    return tmp_path_factory.mktemp("machine")


@pytest.fixture(scope="module")
def limited(tiny_model: Path, port: int, folder: Path) -> Iterator[RunningServer]:
    """A server with few descriptors; the last test that has it kills it."""
    command = ["sh", "-c", f"ulimit -n 96; exec {shlex.join(command_of(tiny_model, port, *PATIENT))}"]
    with (folder / "server.log").open("wb") as log, server(command, port, folder, log) as running:
        yield running


@pytest.fixture(scope="module")
def unlogged(tiny_model: Path, port: int, folder: Path) -> Iterator[RunningServer]:
    """The next server at that port, whose log finds the disk full."""
    command = command_of(tiny_model, port, "--log-level", "debug")
    with Path("/dev/full").open("wb") as full, server(command, port, folder, full) as running:
        yield running


@contextlib.contextmanager
def server(command: list[str], port: int, folder: Path, output: IO[bytes] | int) -> Iterator[RunningServer]:
    """Ready when this yields. Where its words go is the caller's choice."""
    environment = {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)} | os.environ
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    running = RunningServer(process, folder / "server.log", f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: process.poll() is not None or is_ready(running), READY_WITHIN_S)
        assert process.poll() is None, f"it ended with code {process.returncode}"
        yield running
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(10)
        process.kill()
        process.wait()


def is_ready(running: RunningServer) -> bool:
    try:
        return httpx.get(f"{running.url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def ask(running: RunningServer, **fields: Any) -> httpx.Response:
    body = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True, **fields}
    return httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)


def complete(running: RunningServer, **fields: Any) -> dict[str, Any]:
    reply = ask(running, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_server_out_of_descriptors_answers_again_when_there_are_some(
    limited: RunningServer, port: int
) -> None:
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(200)]
    wait_for(lambda: len(list(Path(f"/proc/{limited.process.pid}/fd").iterdir())) >= 80)
    time.sleep(0.5)
    assert is_ready(limited)  # the silent give way
    for each in crowd:
        each.close()
    # Probes are let in before the server has seen all of the crowd leave.
    wait_for(lambda: ask(limited).status_code == 200)
    assert is_ready(limited)
    assert limited.process.poll() is None
    assert limited.metric("tokenyard:engine_restarts_total") == 0
    assert limited.log.stat().st_size < 20_000


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()]


def test_after_kill_9_the_next_server_takes_the_port_and_clears_up(
    limited: RunningServer, folder: Path, request: pytest.FixtureRequest
) -> None:
    """No process outlives the one that is killed, not even in the middle of a grammar."""
    # Probes that have left may still hold the few places.
    easy = {"structured_outputs": {"regex": "[ab]+"}, "ignore_eos": False}
    wait_for(lambda: [ask(limited, **easy).status_code for _ in range(3)] == [200] * 3)
    pids = [limited.process.pid, limited.engine_pid, limited.grammar_pid]
    busy_after = used_ticks(pids[-1]) + 5
    with ThreadPoolExecutor(1) as client:
        asked = {"json": json.loads(ENDLESS.text)}
        hopeless = client.submit(ask, limited, structured_outputs=asked, ignore_eos=False)
        wait_for(lambda: hopeless.done() or used_ticks(pids[-1]) >= busy_after)
        assert not hopeless.done(), hopeless.result().text
        before = left_in(folder)
        limited.send(signal.SIGKILL)
        limited.wait()
        assert isinstance(hopeless.exception(60), httpx.TransportError)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    complete(request.getfixturevalue("unlogged"))
    (after,) = left_in(folder)
    assert [after] != before, "what the one before left is still there"
    assert re.fullmatch("tokenyard-.{8}", after), "it cannot be foreseen"


def test_a_clock_that_jumps_by_a_day_and_back_ends_nothing(
    mortal_server: RunningServer, clock_offset: Path
) -> None:
    num_restarts = mortal_server.metric("tokenyard:engine_restarts_total")
    before = complete(mortal_server)["created"]
    for offset_s in (DAY_S, -DAY_S, 0):
        replies: list[dict[str, Any]] = []
        under_way = threading.Thread(
            target=lambda replies=replies: replies.append(complete(mortal_server, max_tokens=400, timeout=30))
        )
        under_way.start()
        clock_offset.write_text(str(offset_s))
        for _ in range(10):  # longer than the heartbeats are apart
            assert httpx.get(f"{mortal_server.url}/health/live").status_code == 200
            assert is_ready(mortal_server)
            time.sleep(0.15)
        under_way.join()
        assert replies[0]["usage"]["completion_tokens"] == 400
        assert abs(complete(mortal_server)["created"] - before - offset_s) < 60, "the clock has not jumped"
    assert mortal_server.metric("tokenyard:engine_restarts_total") == num_restarts


def test_a_full_disk_costs_the_log_and_ends_a_batch_in_one_line_but_not_the_server(
    unlogged: RunningServer, tmp_path: Path
) -> None:
    requests = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/completions"} for i in range(20)]
    lines = [json.dumps({**each, "body": {"prompt": "x", "max_tokens": 2}}) for each in requests]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    batch = [sys.executable, "-m", "server", "run-batch", *files, "--base-url", unlogged.url]
    # The limit of a file's size stands for a disk: what is beyond it cannot be written, bytecode neither.
    limited = f"ulimit -f 4; PYTHONDONTWRITEBYTECODE=1 exec {shlex.join(batch)}"
    cut_off = run(["sh", "-c", limited])
    assert cut_off.returncode == 1
    assert "out.jsonl cannot be written (File too large)" in cut_off.stderr
    assert "Traceback" not in cut_off.stderr
    assert run(batch).returncode == 0, "once there is room it goes on"
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(20))
    complete(unlogged)
    unlogged.send(signal.SIGTERM)
    assert unlogged.wait() == 0


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_server_whose_log_nobody_reads_serves_and_leaves(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    try:
        command = command_of(tiny_model, port, "--log-level", "debug")
        with server(command, port, tmp_path, writing) as running:
            for _ in range(40):
                complete(running, max_tokens=1)
                assert httpx.get(f"{running.url}/health/live").status_code == 200
            (num_bytes,) = struct.unpack("i", fcntl.ioctl(reading, termios.FIONREAD, bytes(4)))
            assert num_bytes > PIPE_BYTES - 1000, "there was room for all that was said"
            running.send(signal.SIGTERM)
            assert running.wait() == 0
    finally:
        os.close(reading)
        os.close(writing)


def cap_memory(pid: int, more_bytes: int = 0) -> None:
    """Let a process map no more than so much: what a limit without a killer does."""
    found = re.search(r"VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    resource.prlimit(pid, resource.RLIMIT_AS, (int(found[1]) * 1024 + more_bytes, resource.RLIM_INFINITY))


def statuses_of(running: RunningServer, bodies: list[dict[str, Any]]) -> set[int]:
    """Statuses of requests that are sent at once. Each has an answer in OpenAI's form."""
    url = f"{running.url}/v1/completions"
    with ThreadPoolExecutor(len(bodies)) as clients:
        replies = list(clients.map(lambda body: httpx.post(url, json=body, timeout=60), bodies))
    assert all("choices" in reply.json() or reply.json()["error"]["code"] for reply in replies)
    return {reply.status_code for reply in replies}


def test_an_api_process_near_its_limit_of_memory_refuses_what_comes_and_ends_what_it_has_begun(
    mortal_server: RunningServer,
) -> None:
    running, before = mortal_server, len(mortal_server.text())
    streamed = {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
    large = [{"prompt": "word " * 800_000}] * 6
    with (
        httpx.Client(base_url=running.url, timeout=60) as client,
        contextlib.ExitStack() as streams,
    ):
        begun = [streams.enter_context(client.stream("POST", "/v1/completions", json=streamed)) for _ in "ab"]
        cap_memory(running.process.pid, 16 << 20)  # less than a twentieth of what it maps
        wait_for(lambda: ask(running).status_code == 503)
        assert statuses_of(running, large) == {503}
        for stream in begun:
            assert stream.read().endswith(b"data: [DONE]\n\n")
        resource.prlimit(running.process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        wait_for(lambda: ask(running).status_code == 200)
    assert "Error" not in running.text()[before:]


def test_an_engine_that_gets_no_more_memory_costs_no_request_its_answer_and_serves_again_when_it_does(
    mortal_server: RunningServer,
) -> None:
    """If it stands still for want of memory, it is replaced before its clients lose their patience."""
    running, engine_pid = mortal_server, mortal_server.engine_pid
    wide = [{"prompt": [5 + i] * 400, "max_tokens": 40, "n": 4, "ignore_eos": True} for i in range(16)]
    assert engine_pid is not None
    cap_memory(engine_pid)
    assert statuses_of(running, wide) <= {200, 429, 500, 503}
    if running.engine_pid == engine_pid:  # else another one has taken over, without the limit
        resource.prlimit(engine_pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    wait_for(lambda: is_ready(running), within_s=READY_WITHIN_S)
    complete(running)
    assert running.process.poll() is None
