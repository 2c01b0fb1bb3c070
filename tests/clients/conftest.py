"""Paths of the other clients."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT

INSTALLED = ROOT / ".clients"
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter beside which the other Python clients are installed."""
    found = INSTALLED / "python" / "bin" / "python"
    if not found.exists():
        pytest.skip("run tests/clients/install")
    return found


@pytest.fixture(scope="session")
def node() -> Path:
    """The folder in which Node finds the OpenAI SDK."""
    found = INSTALLED / "node" / "node_modules" / "openai"
    if not found.exists() or shutil.which("node") is None:
        pytest.skip("run tests/clients/install, with Node and npm")
    return INSTALLED / "node"


def run(*command: str | Path, url: str) -> dict[str, object]:
    """Run a client's script; what it prints last is a JSON object."""
    # No outbound traffic: neither prices nor telemetry are anybody's business here.
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found
