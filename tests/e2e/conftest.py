"""Servers that several tests share: starting one takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.options.found_model import DEMO_MODEL
from tests.adapters import write_adapter
from tests.e2e.serving import NGRAM, RunningServer, running_server

KEY = "key-for-the-page"
CROWDED = ("--num-gpu-blocks-override", "24", "--block-size", "8", "--max-num-seqs", "64", "--enable-admin")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of that server's adapters."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("start", "sql", "law"), 1):
        write_adapter(root / name, DEMO_MODEL, seed=seed, rank=4, alpha=40)
    return root


@pytest.fixture(scope="session")
def step_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which that server traces its steps."""
    return tmp_path_factory.mktemp("trace") / "steps.jsonl"


@pytest.fixture(scope="session")
def equipped_server(
    adapters: Path, step_trace: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The built-in model with adapters, drafts, a second for a grammar, and no dialect of calls."""
    options = (
        *("--lora-modules", f"start={adapters / 'start'}", "--lora-directory", str(adapters)),
        *("--state-folder", str(tmp_path_factory.mktemp("state"))),
        *("--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "16"),
        *("--speculative-config", NGRAM, "--trace-steps", str(step_trace)),
        *("--grammar-compile-timeout", "1s", "--tool-call-parser", "generic"),
    )
    with running_server(tmp_path_factory.mktemp("equipped"), *options) as server:
        yield server


@pytest.fixture(scope="session")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The built-in model behind the page, with a key, an adapter, and too few blocks for all."""
    folder = tmp_path_factory.mktemp("page")
    poet = write_adapter(folder / "poet", DEMO_MODEL, rank=2)
    options = (
        *("--num-gpu-blocks-override", "48", "--block-size", "16", "--max-num-seqs", "8"),
        *("--lora-modules", f"poet={poet}", "--scheduling-policy", "priority", "--num-threads", "1"),
    )
    with running_server(folder, *options, variables={"TOKENYARD_API_KEY": KEY}) as server:
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
