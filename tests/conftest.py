"""Fixtures that tests of several folders share."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import httpx._transports.default as httpx_transports
import pytest

from campaigns.servers.free_ports import free_port
from tests.checkpoints import make_checkpoint

# Triton's kernels run in its interpreter, on the CPU. Triton reads this when it is first imported, its own
# functions included, so it holds for the whole process.
# With a GPU to test on (tests/worker/gpu/conftest.py) they are compiled for it.
os.environ["TRITON_INTERPRET"] = "0" if os.environ.get("TOKENYARD_TEST_DEVICE", "cpu") != "cpu" else "1"

# The engine process sets this for itself, for the same reason: threads of torch that spin while they wait
# hold the cores that the servers under test need. libgomp reads it when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Servers and tools under test are started some hundred times. Where Python may keep no bytecode, each start
# compiles all modules anew, and each process of pytest rewrites all asserts.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TESTS = Path(__file__).resolve().parent
CORE = ("engine", "scheduler", "server", "deploy/test_docs.py", "test_architecture.py")
"""Folders and files of the core: `python -m pytest -m core`, under a minute, and torch is not loaded."""
NOT_CORE = frozenset(
    {
        # They start an engine or another process for each test.
        *("test_client.py", "test_giving_way.py", "test_grammar_compiler.py", "test_engine_processes.py"),
        *("test_doctor.py", "test_run_batch.py", "test_terminal.py", "test_tokenizer_trial.py"),
        *("test_launch.py", "test_chat_template.py"),
        # They import torch.
        *("core/test_overlapped_loop.py", "core/test_prefill_limit.py", "core/test_pulse.py"),
        # They wait for real time: slow clients, silent connections, an event loop that stands still.
        *("test_body_limit.py", "test_connections.py", "test_health_listener.py", "test_lingering.py"),
        *("test_disconnects.py", "test_tls.py", "test_half_closed.py", "test_http_client.py"),
        *("test_pull_command.py", "test_switchboard.py"),
        # They try thousands of requests.
        *("test_fuzz.py", "test_wire_histories.py"),
    }
)


def is_core(path: Path) -> bool:
    """Whether a test file, or anything in a folder, belongs to the core."""
    place = path.relative_to(TESTS).as_posix()
    if path.is_dir():
        return any(f"{part}/".startswith(f"{place}/") or f"{place}/".startswith(f"{part}/") for part in CORE)
    is_slow = any(f"/{place}".endswith(f"/{name}") for name in NOT_CORE)
    return not is_slow and any(f"{place}/".startswith(f"{part}/") for part in CORE)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "core: the tests of a minute; tests/conftest.py lists their files")
    _read_certificates_once()
    # Five seconds are httpx's patience, of which a busy machine may need more for an answer.
    httpx._config.DEFAULT_TIMEOUT_CONFIG.__init__(60.0)  # type: ignore[misc] # the one that all calls share


def _read_certificates_once() -> None:
    """Share one TLS context among httpx's clients: each reads all certificates anew, for 40 ms."""
    make = httpx_transports.create_ssl_context
    make_once = cache(make)

    def take(**asked: Any) -> Any:
        is_usual = asked.get("verify") is True and asked.get("cert") is None
        return make_once() if is_usual else make(**asked)

    httpx_transports.create_ssl_context = take


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m core` no other file is even imported."""
    if config.option.markexpr != "core" or collection_path == TESTS or TESTS not in collection_path.parents:
        return None
    return None if is_core(collection_path) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if TESTS in item.path.parents and is_core(item.path):
            item.add_marker("core")


@pytest.fixture
def unused_tcp_port() -> int:
    """In place of pytest-asyncio's, which is a port that anyone may get in the meantime."""
    return free_port()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: no sense, but always the same nonsense."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with so many layers that a step takes a while, on a fast machine too."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "deep", num_hidden_layers=48)
