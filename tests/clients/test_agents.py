"""Agents that others wrote go through a whole loop: they ask, the model calls, they run it, it answers."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.conftest import INSTALLED
from tests.clients.parrot import ANSWER, FILE, make_seeing_parrot
from tests.e2e.serving import RunningServer, running_server
from tests.engine.media.made_pictures import picture

pytestmark = pytest.mark.night

PROGRAMS = INSTALLED / "node" / "node_modules" / ".bin"
ASKED = f"Read {FILE} and say what it says"
NOTE = b"the yard is open"
CODEX = """\
model = "parrot"
model_provider = "tokenyard"

[model_providers.tokenyard]
name = "Tokenyard"
base_url = "ADDRESS/v1"
wire_api = "responses"
env_key = "YARD_KEY"
"""
OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "tokenyard": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "ADDRESS/v1", "apiKey": "none"},
            "models": {"parrot": {"limit": {"context": 131072, "output": 4096}}},
        }
    },
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the agent that is shown a picture."""
    return tmp_path_factory.mktemp("seen")


@pytest.fixture(scope="module")
def parrot(seen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("parrot")
    model = make_seeing_parrot(folder / "model", seen / "work" / "shot.png")
    with running_server(folder, str(model), "--served-model-name", "parrot") as server:
        yield server


def loop_of(
    program: str,
    *arguments: str,
    folder: Path,
    variables: dict[str, str],
    file: tuple[str, bytes] = (FILE, NOTE),
) -> str:
    """Return what an agent prints that is asked about a note in its folder. Skips where there is none."""
    found = PROGRAMS / program
    if not found.exists():
        pytest.skip("run tests/clients/install, with Node and npm")
    work = folder / "work"
    work.mkdir()
    (work / file[0]).write_bytes(file[1])
    done = subprocess.run(
        [found, *arguments],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    if done.returncode and subprocess.run([found, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("run tests/clients/install, with Node and npm")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def requests_of(server: RunningServer) -> list[dict]:
    """The lines of the log about requests that had an answer of the model."""
    lines = (json.loads(line) for line in server.text().splitlines() if line.startswith("{"))
    return [line for line in lines if line["message"] == "request" and "output_tokens" in line]


def check_loop(server: RunningServer, num_before: int, said: str, route: str) -> list[dict]:
    """Hold an agent against two turns at least, the later ones out of the cache, and the answer."""
    assert ANSWER in said
    turns = [line for line in requests_of(server)[num_before:] if line["route"] == route]
    assert len(turns) >= 2
    assert all(line["status"] == 200 for line in turns)
    assert turns[-1]["cached_tokens"] > turns[-1]["prompt_tokens"] / 2, "the second turn begins as the first"
    return turns


def test_codex_reads_a_file_and_is_answered(parrot, tmp_path):
    num_before = len(requests_of(parrot))
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(CODEX.replace("ADDRESS", parrot.url))
    flags = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    said = loop_of("codex", *flags, ASKED, folder=tmp_path, variables={"YARD_KEY": "none"})
    assert NOTE.decode() in said
    turns = check_loop(parrot, num_before, said, "/v1/responses")
    assert {line["ignored"] for line in turns} == {"tools.web_search"}


def variables_of(server: RunningServer) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def test_claude_code_shows_a_picture_and_is_answered(parrot, seen):
    num_before = len(requests_of(parrot))
    asked = f"Read {seen / 'work' / 'shot.png'} and say what it shows"
    flags = ("-p", asked, "--model", "parrot", "--allowedTools", "Read")
    variables, file = variables_of(parrot), ("shot.png", picture(320, 240))
    said = loop_of("claude", *flags, folder=seen, variables=variables, file=file)
    check_loop(parrot, num_before, said, "/v1/messages")
    metrics = httpx.get(f"{parrot.url}/metrics").text
    assert 'tokenyard:pictures_total{outcome="prepared"}' in metrics
    assert "tokenyard:encoder_inputs_total 1.0" in metrics


def test_opencode_reads_a_file_and_is_answered(parrot, tmp_path):
    num_before = len(requests_of(parrot))
    settings = tmp_path / ".config" / "opencode"
    settings.mkdir(parents=True)
    (settings / "opencode.json").write_text(json.dumps(OPENCODE).replace("ADDRESS", parrot.url))
    flags = ("run", "--model", "tokenyard/parrot", ASKED)
    said = loop_of("opencode", *flags, folder=tmp_path, variables={"OPENCODE_DISABLE_AUTOUPDATE": "1"})
    assert NOTE.decode() in said
    check_loop(parrot, num_before, said, "/v1/chat/completions")
