"""Fixtures that tests of several folders share."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import httpx._transports.default as httpx_transports
import pytest

from campaigns.servers.free_ports import free_port
from tests.checkpoints import make_checkpoint
from tests.e2e.serving import RunningServer, running_server
from tests.tiers import ALONE, DAY, NIGHT, NUM_TIMES, covering, has_long_histories, may_hold, place_of

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

# What is loaded and collected stays: pytest_runtestloop exempts it from all later searches for garbage.
gc.disable()
_text_of = cache(Path.read_text)


def pytest_configure(config: pytest.Config) -> None:
    if config.args_source is not pytest.Config.ArgsSource.ARGS and not config.option.markexpr:
        config.option.markexpr = DAY
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
    """Leave out, unread, files and folders without a test of the tier: imports are most of the collection."""
    tier = config.option.markexpr
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    is_other = not collection_path.is_dir() and not collection_path.match("test_*.py")
    return None if is_other or any(may_hold(tier, _text_of(file)) for file in files) else True


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a few cases of a product marked `pairs`: every two values together by day, every three by night.

    Products that run by night alone have every two.
    """
    if not metafunc._calls or metafunc.definition.get_closest_marker("pairs") is None:
        return
    rows = [call._idlist for call in metafunc._calls]  # a word for each `parametrize`
    pairs = covering(rows)
    is_of_night = metafunc.definition.get_closest_marker("night") is not None
    has_pairs_alone = is_of_night or metafunc.config.option.markexpr == DAY
    chosen = pairs if has_pairs_alone else covering(rows, 3, kept=pairs)
    for place in chosen - pairs:
        metafunc._calls[place].marks.append(pytest.mark.night.mark)
    metafunc._calls = [metafunc._calls[place] for place in sorted(chosen)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if NUM_TIMES > 1:
        for item in items:
            if item.path.parent.name == "properties" and has_long_histories(_text_of(item.path)):
                item.add_marker("night")
    _check_that_files_name_their_tiers(items)
    items.sort(key=lambda item: place_of(item.path.as_posix()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.option.dist != "loadfile":
        return None
    from tests.spread import Spread

    return Spread(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # searches for garbage took a quarter of what makes many objects
    atexit.register(gc.unfreeze)  # what extension modules made is taken down in the end


def _check_that_files_name_their_tiers(items: list[pytest.Item]) -> None:
    """Raise UsageError for a file whose tests of the night, or alone, would be left out unread."""
    for tier in (NIGHT, ALONE):
        for path in sorted({item.path for item in items if item.get_closest_marker(tier)}):
            if not may_hold(tier, _text_of(path)):
                raise pytest.UsageError(f"{path} has tests of the tier {tier!r}, and does not name it")


@pytest.fixture
def unused_tcp_port() -> int:
    """In place of pytest-asyncio's, which is a port that anyone may get in the meantime."""
    return free_port()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: no sense, but always the same nonsense."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The built-in model with nothing set."""
    with running_server(tmp_path_factory.mktemp("demo")) as server:
        yield server


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with so many layers that a step takes a while, on a fast machine too."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "deep", num_hidden_layers=48)
