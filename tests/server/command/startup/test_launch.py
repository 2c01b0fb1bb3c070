"""Starts that cannot come to anything, and signals: what ends a server, and how soon."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from engine.frontend.client import AsyncEngine
from engine.frontend.health import Welcome
from engine.models.entries import ModelSpec, resolve_models
from engine.options.engine_config import EngineConfig, ServerConfig, resolve
from engine.options.found_model import DEMO_MODEL
from engine.options.options import OptionError
from engine.options.sources import read_options
from engine.processes import child_process, engine_processes
from engine.text.renderers import Renderers
from server.command.startup import launch, serving
from server.command.startup.banner import Announcement
from server.command.startup.signals import Signals
from server.edge.http.listening import Listeners, listen
from tests.engine.text.test_tokenizer_trial import save


def configs(model: Path, **given: str) -> tuple[EngineConfig, ServerConfig]:
    return resolve(read_options({"model": str(model), "device": "cpu", **given}, {}), environment={})


def run(model: Path, **given: str) -> int:
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0))
        models, server = resolve_models(read_options({"model": str(model), "device": "cpu", **given}, {}))
        return launch.run(models, server, Listeners(main=listener, probes=None, admin=None))


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("tls_cert", "no certificate", "no certificate and key that belong together"),
        ("state_folder", "a file", "it cannot be used"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_start_before_there_is_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, content: str, words: str
) -> None:
    monkeypatch.setattr(launch, "ModelEngines", lambda _: pytest.fail("an engine was made"))
    (tmp_path / "file").write_text(content)
    with pytest.raises(OptionError, match=words):
        run(DEMO_MODEL, **{option: str(tmp_path / "file")})


def test_a_tokenizer_that_fails_its_trial_ends_the_start_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The trial runs beside the start of the engine process, which is ended."""
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    save(tmp_path, r"(x+x+)+[yz]")
    monkeypatch.setattr(engine_processes, "_GOODBYE_S", 0.1)
    monkeypatch.setattr("server.command.startup.serving.serve", lambda *_: pytest.fail("it is served"))
    assert run(tmp_path) == launch.EXIT_BAD_MODEL
    assert "splits texts by a pattern that takes too long" in capfd.readouterr().err


def test_weights_that_are_cut_off_keep_a_model_on_demand_from_being_loaded_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def take(models: tuple[ModelSpec, ...]) -> NoReturn:
        seen.extend(models)
        raise OptionError("enough", "", "")

    broken = tmp_path / "broken"
    shutil.copytree(DEMO_MODEL, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    file = tmp_path / "models.yaml"
    odd = tmp_path / "odd"  # of a kind that is not known
    shutil.copytree(DEMO_MODEL, odd)
    config = json.loads((odd / "config.json").read_text()) | {"model_type": "odd"}
    (odd / "config.json").write_text(json.dumps(config | {"architectures": ["OddForCausalLM"]}))
    monkeypatch.setattr(launch, "ModelEngines", take)
    with listen("127.0.0.1", 0) as listener:
        for load in ("demand", "start"):
            later = f"{{model: {broken}, load: {load}}}, {{model: {odd}, load: demand}}"
            file.write_text(f"models: [{{load: demand}}, {later}]")
            models, server = resolve_models(read_options({"models": str(file), "device": "cpu"}, {}))
            listeners = Listeners(main=listener, probes=None, admin=None)
            if load == "start":
                assert launch.run(models, server, listeners) == launch.EXIT_BAD_MODEL
                continue
            with pytest.raises(OptionError, match="enough"):
                launch.run(models, server, listeners)
    sound, faulty, unknown = seen
    assert "odd" in unknown.fault
    assert sound.room.num_bytes > 0
    assert (sound.fault, "model.safetensors" in faulty.fault) == ("", True)


def test_a_start_without_a_process_for_chats_ends_with_a_code_after_which_it_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def be_late(_: Renderers) -> str:
        raise TimeoutError

    monkeypatch.setattr(Renderers, "try_program", be_late)
    monkeypatch.setattr(engine_processes, "_GOODBYE_S", 0.1)
    monkeypatch.setattr("server.command.startup.serving.serve", lambda *_: pytest.fail("it is served"))
    assert run(DEMO_MODEL) == 70
    assert "there is no process to render chats in: it has not answered in time" in capfd.readouterr().err


@pytest.fixture
def tried_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose tokenizer is tried for a minute."""
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    save(tmp_path, r"[a-z]+")
    monkeypatch.setattr(child_process, "INTERPRETER", (sys.executable, "-c", "import time; time.sleep(60)"))
    return tmp_path


def children() -> set[str]:
    return {pid for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()}


@asynccontextmanager
async def signalled(engine: AsyncEngine) -> AsyncIterator[Signals]:
    """The signals of a server; afterwards the engine is closed."""
    signals = Signals()
    try:
        yield signals
    finally:
        await engine.close()
        signals.restore()


async def test_a_signal_ends_the_start_while_the_tokenizer_is_still_tried(tried_for_long: Path) -> None:
    before = children()
    engine = AsyncEngine(configs(tried_for_long)[0])
    assert children() > before
    async with signalled(engine) as signals, asyncio.timeout(30):
        os.kill(os.getpid(), signal.SIGTERM)
        assert not await launch._texts_are_tried(engine, signals)
    assert children() == before


def test_an_engine_that_cannot_be_made_leaves_no_trial_behind(tried_for_long: Path) -> None:
    before = children()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config, _ = configs(tried_for_long, kv_events_port=str(taken.getsockname()[1]))
        with pytest.raises(OptionError, match="address already in use"):
            AsyncEngine(config)
    assert children() == before


async def test_a_second_signal_ends_the_drain_itself_at_once() -> None:
    engine_config, server_config = configs(DEMO_MODEL, shutdown_timeout="60")
    engine = AsyncEngine(engine_config)
    engine._requests.is_empty.clear()  # a request that never ends
    engine._supervision = asyncio.create_task(asyncio.sleep(60))  # type: ignore[arg-type] # by no process
    listening = asyncio.create_task(asyncio.sleep(60))
    async with signalled(engine) as signals, asyncio.timeout(30):
        announcement: Announcement = None  # type: ignore[assignment] # nothing is announced
        ending = asyncio.create_task(
            serving._until_the_end(engine, signals, listening, server_config, announcement)
        )
        os.kill(os.getpid(), signal.SIGTERM)
        while engine._health.welcome is not Welcome.CLOSED:
            await asyncio.sleep(0.01)
        assert not ending.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert await ending == 0
        engine._supervision.cancel()
        engine._supervision = None
    listening.cancel()
