"""What tests of several folders share."""

import os
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint

# Triton's kernels run in its interpreter, on the CPU. Triton reads this when it is first imported, its own
# functions included, so it holds for the whole process.
# With a GPU to test on (tests/worker/gpu/conftest.py) they are compiled for it.
os.environ["TRITON_INTERPRET"] = "0" if os.environ.get("TOKENYARD_TEST_DEVICE", "cpu") != "cpu" else "1"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: no sense, but always the same nonsense."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with so many layers that a step takes a while, on a fast machine too."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "deep", num_hidden_layers=48)
