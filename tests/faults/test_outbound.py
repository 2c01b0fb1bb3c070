"""The server reaches nobody: no hub, no telemetry, no address that a client or a checkpoint names."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import ROOT, RunningServer, running_server

pytestmark = pytest.mark.night

GUARD = Path(__file__).parent / "outbound_guard"
AWAY = "http://192.0.2.1/x"  # an address that belongs to nobody, by RFC 5737
STRACE = shutil.which("strace")
NEEDED = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The log of the guard, which every Python process has from here on that is started."""
    log = tmp_path_factory.mktemp("guard") / "log"
    log.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(GUARD))
        patch.setenv("OUTBOUND_LOG", str(log))
        # What an operator may have set for other programs must not open the door here.
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("TOKENYARD_API_KEY", "not-for-children")
        yield log


@pytest.fixture(scope="module")
def bare_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without all that may be missing, whose configuration names repositories elsewhere."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    folder.mkdir()
    for name in NEEDED:
        shutil.copy(tiny_model / name, folder)
    config = json.loads((folder / "config.json").read_text())
    elsewhere = {
        "AutoConfig": "someone/code--modeling.Config",
        "AutoModelForCausalLM": "someone/code--modeling.M",
    }
    config |= {"_name_or_path": "someone/model", "auto_map": elsewhere}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(
    guarded: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), str(tiny_model), "--enable-admin") as server:
        yield server


def attempts(log: Path) -> str:
    text = log.read_text()
    return text[text.find("OUTBOUND") :] if "OUTBOUND" in text else ""


def client_of(server: RunningServer) -> httpx.Client:
    headers = {"authorization": "Bearer not-for-children"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60)


def chat(content: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


SCHEMA = {"type": "object", "properties": {"a": {"$ref": f"{AWAY}.json#/definitions/a"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALLS = {
    "completion": ("/v1/completions", {"prompt": f"read {AWAY}", "max_tokens": 4}),
    "chat": ("/v1/chat/completions", chat(f"fetch {AWAY}")),
    "image": ("/v1/chat/completions", chat([{"type": "image_url", "image_url": {"url": f"{AWAY}.png"}}])),
    "file": ("/v1/chat/completions", chat([{"type": "file", "file": {"file_data": f"{AWAY}.pdf"}}])),
    "schema": (
        "/v1/chat/completions",
        chat("x", response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}),
    ),
    "whole document as a schema": (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"json": {"$ref": AWAY}}},
    ),
    "expression": (
        "/v1/completions",
        {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "[ab]+"}},
    ),
    "grammar that imports": (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"grammar": f'%import "{AWAY}"\nstart: "a"'}},
    ),
    "tool": ("/v1/chat/completions", chat("x", tools=[TOOL], tool_choice="required")),
    "template variable": ("/v1/chat/completions", chat("x", chat_template_kwargs={"url": AWAY})),
    "response": ("/v1/responses", {"input": f"fetch {AWAY}", "max_output_tokens": 4}),
    "response with an image": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": f"{AWAY}.png"}]}]},
    ),
    "response with a server of tools": (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "mcp", "server_label": "s", "server_url": AWAY}]},
    ),
    "background": ("/v1/responses", {"input": "x", "background": True, "max_output_tokens": 4}),
    "embedding": ("/v1/embeddings", {"input": AWAY}),
    "score": ("/v1/score", {"text_1": AWAY, "text_2": "x"}),
    "rerank": ("/v1/rerank", {"query": AWAY, "documents": ["x"]}),
    "tokenize": ("/tokenize", {"prompt": AWAY}),
    "detokenize": ("/detokenize", {"tokens": [5, 6]}),
    "model elsewhere": ("/v1/completions", {"prompt": "x", "model": "someone/other-model"}),
    "reset": ("/admin/reset_prefix_cache", {}),
}
SERVED = {"completion", "chat", "expression", "response", "tokenize", "detokenize"}
SPOOFED = {"host": "192.0.2.1", "x-forwarded-host": "192.0.2.1", "referer": AWAY, "origin": AWAY}


@pytest.mark.parametrize("name", CALLS)
def test_whatever_a_request_names_is_not_fetched(server: RunningServer, guarded: Path, name: str) -> None:
    path, body = CALLS[name]
    with client_of(server) as client:
        reply = client.post(path, json=body, headers=SPOOFED)
    assert reply.status_code < 500, reply.text
    assert reply.status_code == 200 or name not in SERVED, reply.text
    assert not attempts(guarded)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/metrics",
        "/health",
        "/version",
        "/openapi.json",
        "/admin/requests",
        "/docs",
        f"/{AWAY}",
    ],
)
def test_no_page_is_made_from_elsewhere(server: RunningServer, guarded: Path, path: str) -> None:
    with client_of(server) as client:
        assert client.get(path, headers=SPOOFED).status_code in (200, 404)
    assert not attempts(guarded)


def test_all_processes_are_guarded_offline_and_hold_no_key(server: RunningServer, guarded: Path) -> None:
    with client_of(server) as client:
        client.post("/v1/completions", json=CALLS["expression"][1])
    started = guarded.read_text()
    children = ("engine.core.process", "engine.grammars.process", "engine.text.template_process")
    for module in ("server serve", *children):
        assert f"-m {module}" in started
    for pid in (server.engine_pid, server.grammar_pid, server.renderer_pid):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"HF_HUB_OFFLINE=1" in variables
        assert not any(b"not-for-children" in variable for variable in variables)


def watched_by(calls: Path) -> list[str]:
    """Command that lets the kernel write down what a process and its children send; empty where none may."""
    if STRACE is None:
        return []
    words = [STRACE, "-D", "-f", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg", "-o", str(calls)]
    is_allowed = not subprocess.run([*words, "true"], capture_output=True, check=False).returncode
    return words if is_allowed else []


def tool(*words: str, wrapper: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*wrapper, sys.executable, "-m", "server", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=90, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(("missing", "code"), [("config.json", 2), ("model-00002-of-00002.safetensors", 78)])
def test_what_is_missing_and_needed_is_told_at_once_and_not_looked_for(
    guarded: Path, bare_model: Path, tmp_path: Path, missing: str, code: int
) -> None:
    folder = Path(shutil.copytree(bare_model, tmp_path / "model"))
    if missing in NEEDED:
        (folder / missing).unlink()
    else:
        first = missing.replace("00002-of", "00001-of")
        (folder / "model.safetensors").rename(folder / first)
        index = {"weight_map": {"a": first, "b": missing}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    began_s = time.monotonic()
    done = tool("serve", str(folder), "--port", "0")
    assert time.monotonic() - began_s < 60, "it waited for somebody"
    assert done.returncode == code
    assert missing in done.stderr.splitlines()[-1]
    assert not attempts(guarded)


def test_a_name_that_is_not_in_the_local_cache_is_not_downloaded(guarded: Path) -> None:
    done = tool("serve", "someone/model-of-theirs", "--port", "0")
    assert done.returncode == 2
    assert "nothing is downloaded" in done.stderr
    assert not attempts(guarded)


def test_a_folder_that_lacks_files_answers_a_batch_without_asking_anybody_and_the_kernel_agrees(
    guarded: Path, bare_model: Path, tmp_path: Path
) -> None:
    """Native code too, where processes may be traced: what a library of Rust or C opens, no hook sees."""
    lines = [
        {"custom_id": name, "method": "POST", "url": CALLS[name][0], "body": CALLS[name][1]}
        for name in ("completion", "expression", "chat")
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    calls = tmp_path / "calls"
    wrapper = watched_by(calls)
    done = tool("run-batch", *files, str(bare_model), wrapper=wrapper)
    assert done.returncode == 1, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    statuses = {each["custom_id"]: each["response"]["status_code"] for each in answers}
    assert statuses == {"completion": 200, "expression": 200, "chat": 400}, "it has no template"
    assert not attempts(guarded)
    if not wrapper:
        pytest.skip("strace may not trace here: calls of Python were watched, those of native code not")
    assert "AF_UNIX" in calls.read_text(), "nothing was traced"
    opened = [line for line in calls.read_text().splitlines() if "sin_addr" in line or "sin6_addr" in line]
    assert not [line for line in opened if "127.0.0.1" not in line and '"::1"' not in line]


def test_the_tools_reach_nobody_but_the_server_that_they_are_told(
    server: RunningServer, guarded: Path, bare_model: Path, tmp_path: Path
) -> None:
    for words in (
        ("doctor", str(bare_model), "--port", "0"),
        ("complete", "--base-url", server.url, "--max-tokens", "2", "Once"),
        ("config", "show"),
    ):
        done = tool(*words)
        assert done.returncode == 0, done.stderr
    assert not attempts(guarded)


ATTEMPTS = """
import socket, urllib.request
for attempt in (
    lambda: socket.create_connection(("192.0.2.1", 80), 1),
    lambda: socket.getaddrinfo("nobody.invalid", 80),
    lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)),
    lambda: urllib.request.urlopen("http://nobody.invalid/"),
):
    try:
        attempt()
    except OSError as error:
        assert "no test may reach another machine" in str(error), error
    else:
        raise SystemExit("it was let through")
"""


def test_the_guard_sees_and_stops_whoever_tries(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(GUARD), "OUTBOUND_LOG": str(log)}
    subprocess.run([sys.executable, "-c", ATTEMPTS], env=environment, check=True, timeout=30)
    assert log.read_text().count("OUTBOUND socket.") == 4
