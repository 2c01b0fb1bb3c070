"""What tests of several folders share."""

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: no sense, but always the same nonsense."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")
