"""Births and deaths of a process that is not an engine: only its exit and its messages matter here."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from engine.options.engine_config import resolve
from engine.options.sources import read_options
from engine.process_messages import ToClient
from engine.processes import engine_processes, supervisor
from engine.processes.engine_processes import EngineProcesses
from engine.processes.supervisor import Spare
from tests.checkpoints import write_tokenizer
from worker.machine import num_killed_for_memory

_CHILD = """
import sys, time
from pathlib import Path
from engine.process_messages import Outputs
from engine.processes.transport import EngineSide
side = EngineSide(Path(sys.argv[1]))
{body}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "_FIRST_BACK_OFF_S", 0.01)


def make_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, deaths: list[str], **changes: object
) -> EngineProcesses:
    """The child runs `body`."""
    script = folder / "child.py"
    script.write_text(_CHILD.format(body=body))
    monkeypatch.setattr(supervisor, "_child_arguments", lambda directory: [str(script), str(directory)])
    config, _ = resolve(read_options({"model": str(folder)}, {}), environment={})

    on_message = changes.get("on_message", lambda message: None)
    return EngineProcesses(config, on_message=on_message, on_death=lambda death: deaths.append(death.what))


@pytest.mark.usefixtures("quick")
async def test_a_process_that_dies_again_and_again_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[str] = []
    engine = make_processes(folder, monkeypatch, "sys.exit(3)", deaths)
    gave_up = await asyncio.wait_for(engine.run(), 30)
    assert gave_up is not None
    assert gave_up.exit_code == 70
    assert "died 4 times" in gave_up.what
    assert deaths == ["ended with code 3"] * 4


@pytest.mark.usefixtures("quick")
async def test_a_process_learns_that_the_engine_was_ready_before_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
import msgspec
from engine.options.engine_config import EngineConfig
from engine.process_messages import Ready
from tests.engine.model_facts import facts
config = msgspec.msgpack.decode((Path(sys.argv[1]) / "config.msgpack").read_bytes(), type=EngineConfig)
with Path(config.worker.model_path, "learned").open("a") as learned:
    learned.write(f"{config.worker.is_replacement} ")
side.send(Ready(facts()))
side.close()
"""
    engine = make_processes(folder, monkeypatch, body, [])
    await asyncio.wait_for(engine.run(), 60)
    assert (folder / "learned").read_text() == "False True True True "


@pytest.mark.usefixtures("quick")
async def test_a_process_that_cannot_start_in_the_place_of_one_that_could_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, which may come back. The first of all is not: its configuration is wrong."""
    body = """
from engine.process_messages import Ready, StartFailed
from tests.engine.model_facts import facts
lives = Path({lives!r})
life = len(lives.read_text()) if lives.exists() else 0
lives.write_text("x" * (life + 1))
side.send(Ready(facts()) if life == 0 else StartFailed(what="no memory", fix="free some"))
side.close()
sys.exit(78)
""".replace("{lives!r}", repr(str(folder / "lives")))
    gave_up = await asyncio.wait_for(make_processes(folder, monkeypatch, body, []).run(), 60)
    assert gave_up is not None
    assert (len((folder / "lives").read_text()), gave_up.exit_code, gave_up.fix) == (4, 70, "free some")
    gave_up = await asyncio.wait_for(make_processes(folder, monkeypatch, body, []).run(), 60)
    assert gave_up is not None
    assert (len((folder / "lives").read_text()), gave_up.exit_code) == (5, 78)


@pytest.mark.usefixtures("quick")
async def test_a_message_that_cannot_be_taken_in_counts_as_a_death_and_not_as_silence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[str] = []

    def explode(message: ToClient) -> None:
        raise KeyError("planted")

    body = "side.send(Outputs([]))\ntime.sleep(60)"
    engine = make_processes(folder, monkeypatch, body, deaths, on_message=explode)
    gave_up = await asyncio.wait_for(engine.run(), 30)
    assert gave_up is not None
    assert deaths == ["was killed by signal SIGKILL"] * 4


async def test_a_death_says_if_the_kernel_has_killed_for_want_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, deaths = folder / "sys/fs/cgroup/memory.events", list[str]()
    for path, text in ((folder / "proc/self/cgroup", "0::/"), (events, "oom_kill 4")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    reading = partial(num_killed_for_memory, folder)
    monkeypatch.setattr(engine_processes, "num_killed_for_memory", reading)
    killer = f"Path({str(events)!r}).write_text('oom_kill 5'); os.kill(os.getpid(), 9)"
    for body in (killer, "os.kill(os.getpid(), 9)"):
        engine = make_processes(folder, monkeypatch, f"import os\n{body}", deaths)
        engine.stop_replacing()
        assert await asyncio.wait_for(engine.run(), 30) is not None
    killed = "was killed by signal SIGKILL"
    assert deaths[0].startswith(
        f"{killed}; meanwhile the kernel has killed 1 process(es) of this control group"
    )
    assert deaths[1:] == [killed]


async def until_taken(spare: Spare) -> supervisor.EngineProcess:
    async with asyncio.timeout(60):
        while (process := spare.take()) is None:
            await asyncio.sleep(0.01)
    return process


async def test_a_spare_process_goes_on_with_its_configuration_and_a_dead_one_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
file = Path(sys.argv[1]) / "config.msgpack"
was_there = file.exists()
(file.parent / "imported").touch()
sys.stdin.read()
Path(sys.argv[0]).with_name("seen").write_text(f"{was_there} {file.exists()}")
"""
    engine, spare = make_processes(folder, monkeypatch, body, []), Spare()
    engine.stop_replacing()
    assert spare.take() is None
    spare.prepare()
    process = await until_taken(spare)
    engine.resume(process)
    assert await asyncio.wait_for(engine.run(), 30) is not None
    assert (folder / "seen").read_text() == "False True"
    spare.prepare()
    process = await until_taken(spare)
    process.kill()
    await process.wait()
    spare._starting = lost = asyncio.create_task(asyncio.sleep(0, process))
    await asyncio.sleep(0.01)
    spare.prepare()
    assert spare._starting is not lost
    assert spare.take() is None
    process = await until_taken(spare)
    shutil.rmtree(process._directory.path)
    engine.resume(process)
    assert await asyncio.wait_for(engine.run(), 30) is not None
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL  # it would wait for ever


def test_a_spare_process_that_cannot_import_says_so_and_ends(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    words = ["-m", "engine.core.process", str(tmp_path), str(os.getpid()), "20"]
    child = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        input="",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (child.returncode, "import_worker" in child.stderr) == (1, True), child.stderr
    assert not (tmp_path / "imported").exists()


async def test_stopping_while_the_process_is_being_born_ends_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_processes(folder, monkeypatch, "time.sleep(60)", [])
    living = asyncio.create_task(engine.run())
    await asyncio.sleep(0)
    await asyncio.wait_for(engine.stop(), 30)
    assert await asyncio.wait_for(living, 30) is None


async def test_stopping_does_not_wait_for_the_back_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "_FIRST_BACK_OFF_S", 60.0)
    deaths: list[str] = []
    engine = make_processes(folder, monkeypatch, "sys.exit(3)", deaths)
    living = asyncio.create_task(engine.run())
    while not deaths:
        await asyncio.sleep(0.01)
    await engine.stop()
    assert await asyncio.wait_for(living, 30) is None


@pytest.mark.usefixtures("quick")
async def test_a_folder_for_sockets_that_cannot_be_made_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    engine = make_processes(folder, monkeypatch, "", [])
    gave_up = await asyncio.wait_for(engine.run(), 30)
    assert gave_up is not None
    assert "could not be started" in gave_up.what
    assert "/dev/null" in gave_up.what


async def test_messages_that_come_faster_than_they_are_sent_on_do_not_stop_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_messages, turn = 500, 0
    turns: list[int] = []
    """Turn of the event loop in which each message was taken in."""

    def take(message: ToClient) -> None:
        time.sleep(0.002)
        turns.append(turn)

    body = f"for _ in range({num_messages}): side.send(Outputs([]))\ntime.sleep(60)"
    engine = make_processes(folder, monkeypatch, body, [], on_message=take)
    running = asyncio.create_task(engine.run())
    async with asyncio.timeout(30):
        while len(turns) < num_messages:
            await asyncio.sleep(0)
            turn += 1
    await engine.stop()
    await running
    most_in_a_turn = max(Counter(turns).values())
    assert most_in_a_turn < 50


async def test_all_that_a_process_said_before_it_died_is_taken_in_however_long_that_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_messages = 400
    taken: list[ToClient] = []
    num_taken_at_death: list[int] = []

    def take(message: ToClient) -> None:
        time.sleep(0.003)
        taken.append(message)

    body = f"for _ in range({num_messages}): side.send(Outputs([]))\nside.close()\nsys.exit(3)"
    engine = make_processes(folder, monkeypatch, body, [], on_message=take)
    monkeypatch.setattr(engine, "_on_death", lambda _: num_taken_at_death.append(len(taken)))
    engine.stop_replacing()
    assert await asyncio.wait_for(engine.run(), 30) is not None
    assert num_taken_at_death == [num_messages]
