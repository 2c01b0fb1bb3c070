"""Servers that several tests share: starting one takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import RunningServer, running_server

CROWDED = ("--num-gpu-blocks-override", "24", "--block-size", "8", "--max-num-seqs", "64", "--enable-admin")


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The built-in model with nothing set."""
    with running_server(tmp_path_factory.mktemp("demo")) as server:
        yield server


@pytest.fixture(scope="session")
def crowded_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Room for a few sequences only: whoever sends many gets preemptions."""
    with running_server(tmp_path_factory.mktemp("crowded"), str(tiny_model), *CROWDED) as server:
        yield server


@pytest.fixture(scope="session")
def swapping_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Server like the crowded one; preempted requests go to the swap space, which is too small for all."""
    options = (*CROWDED, "--preemption-mode", "swap", "--swap-space", "48KiB")
    with running_server(tmp_path_factory.mktemp("swapping"), str(tiny_model), *options) as server:
        yield server
