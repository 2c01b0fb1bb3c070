"""The server that outlives the deaths of its engine process, in all files that cause some."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters import write_adapter
from tests.e2e.serving import NGRAM, ROOT, RunningServer, running_server


@pytest.fixture(scope="session")
def clock_offset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with the seconds by which the wall clock of that server and its processes is wrong."""
    file = tmp_path_factory.mktemp("clock") / "offset"
    file.write_text("0")
    return file


@pytest.fixture(scope="session")
def mortal_server(
    tiny_model: Path, clock_offset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """One for all deaths of an engine process, with drafts and a directory of adapters.

    The fourth within five minutes would end it.
    """
    folder = tmp_path_factory.mktemp("mortal")
    write_adapter(folder / "adapters" / "poet", tiny_model, rank=4, seed=1)
    adapters = ("--lora-directory", str(folder / "adapters"))
    options = ("--heartbeat-timeout", "3", "--queue-timeout", "30", "--num-threads", "1")
    clock = Path(__file__).parent / "jumping_clock"
    variables = {"PYTHONPATH": f"{clock}:{ROOT}", "CLOCK_OFFSET": str(clock_offset)}
    words = (*options, *adapters, "--speculative-config", NGRAM)
    with running_server(folder, str(tiny_model), *words, variables=variables) as server:
        yield server
        pids = [server.process.pid, server.engine_pid]
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
