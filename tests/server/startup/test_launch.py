"""Starts that cannot come to anything: what ends them, and how soon."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.options.engine_config import DEMO_MODEL, resolve
from engine.options.option_sources import read_options
from engine.options.options import OptionError
from engine.processes import engine_processes
from server.http.listening import Listeners, listen
from server.startup import launch
from tests.engine.text.test_tokenizer_trial import save


def run(model: Path, **given: str) -> int:
    configs = resolve(read_options({"model": str(model), "device": "cpu", **given}, {}), environment={})
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0))
        return launch.run(*configs, Listeners(main=listener, probes=None, admin=None))


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
    monkeypatch.setattr(launch, "AsyncEngine", lambda _: pytest.fail("an engine was made"))
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
    monkeypatch.setattr("server.startup.serving.serve", lambda *_: pytest.fail("it is served"))
    assert run(tmp_path) == launch.EXIT_BAD_MODEL
    assert "splits texts by a pattern that takes too long" in capfd.readouterr().err
