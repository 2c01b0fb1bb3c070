"""`tokenyard pull` against a stand-in for the hub: what arrives, what is refused, what is resumed."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.options.engine_config import resolve
from engine.options.options import Options
from worker.checkpoint.checksums import Checksums

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = bytes(range(256)) * 4096 * 12
"""More than huggingface_hub keeps in memory before it writes."""
TEXTS = {name: b"{}" for name in ("config.json", "tokenizer.json")}
GOOD = {**TEXTS, "model.safetensors": WEIGHTS, "pytorch_model.bin": b"pickle", "code.py": b"import os"}


class Hub(ThreadingHTTPServer):
    """Models by name, each with its files; answers with weights break off in the middle if asked to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, dict[str, bytes]] = {"org/good": GOOD, "org/pickle": {**TEXTS, "x.bin": b"p"}}
        self.models["org/gguf"] = {"a-Q4_K_M.gguf": b"GGUF" * 100, "a-Q8_0.gguf": b"GGUF" * 200}
        self.breaks_left = 0
        self.lies = False
        self.ranges: list[str] = []
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        self.server.asked.append(self.path)
        if parts[:2] == ["api", "models"]:
            files = self.server.models.get("/".join(parts[2:4]))
            if files is None:
                return self._missing()
            made = self._tree(files) if "tree" in parts else self._info(parts, files)
            return self._send(json.dumps(made).encode())
        files = self.server.models.get("/".join(parts[:2]), {})
        content = files.get("/".join(parts[4:]))
        if content is None:
            return self._missing()
        return self._send(content, self.headers.get("range", ""))

    def _info(self, parts: list[str], files: dict[str, bytes]) -> dict[str, object]:
        siblings = []
        for name, content in files.items():
            digest = hashlib.sha256(b"other" if self.server.lies else content).hexdigest()
            lfs = {"lfs": {"sha256": digest, "size": len(content), "pointerSize": 1}}
            large = name.endswith((".safetensors", ".gguf"))
            siblings.append({"rfilename": name, "size": len(content), **(lfs if large else {})})
        name = "/".join(parts[2:4])
        return {
            "id": name,
            "modelId": name,
            "sha": COMMIT,
            "siblings": siblings,
            "private": False,
            "tags": [],
        }

    def _tree(self, files: dict[str, bytes]) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]

    def _missing(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, content: bytes, ranged: str = "") -> None:
        etag = hashlib.sha256(content).hexdigest()
        if ranged:
            self.server.ranges.append(ranged)
            first = int(ranged.removeprefix("bytes=").split("-")[0])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            content = content[first:]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(content) > 100_000 and self.server.breaks_left:
            self.server.breaks_left -= 1
            self.wfile.write(content[: len(content) * 11 // 12])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


def pull(home: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: huggingface_hub reads its variables once."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-m", "server", "pull", *words],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_arrives_in_the_cache_where_serve_finds_it_without_what_can_run_code(hub, tmp_path) -> None:
    hub.breaks_left = 1
    done = pull(tmp_path, hub.url, "org/good")
    assert done.returncode == 0, done.stderr
    assert "tokenyard serve org/good" in done.stdout
    config, _ = resolve(Options(model="org/good"), environment={"HF_HOME": str(tmp_path)})
    folder = Path(config.model_path)
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges, "the broken transfer went on where it had ended"
    listed = Checksums.read(next(tmp_path.rglob("SHA256SUMS.*")))
    assert listed.check_texts(folder) == 2
    listed.check_weights(folder, [folder / "model.safetensors"], lambda _: None)
    assert not [path for path in hub.asked if ".bin" in path or ".py" in path]


def test_a_chosen_gguf_file_arrives_alone(hub, tmp_path) -> None:
    refused = pull(tmp_path, hub.url, "org/gguf")
    assert refused.returncode == 1
    assert "--include" in refused.stderr
    done = pull(tmp_path, hub.url, "org/gguf", "--include", "*Q4_K_M*")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.rglob("*.gguf")] == ["a-Q4_K_M.gguf"]


@pytest.mark.parametrize(
    ("name", "code", "part"),
    [
        ("org/absent", 1, "has no model org/absent"),
        ("org/pickle", 1, "no *.safetensors"),
        ("a b/c", 1, "write ORG/NAME"),
    ],
)
def test_what_cannot_be_had_is_one_line_that_says_what_to_do(hub, tmp_path, name, code, part) -> None:
    done = pull(tmp_path, hub.url, name)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert part in done.stderr


def test_a_file_that_is_not_what_the_hub_lists_is_removed(hub, tmp_path) -> None:
    hub.lies = True
    done = pull(tmp_path, hub.url, "org/good")
    assert done.returncode == 1
    assert "model.safetensors did not arrive" in done.stderr
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == len(WEIGHTS)
    ]


def test_without_a_network_it_says_so_and_what_else_can_be_done(tmp_path) -> None:
    done = pull(tmp_path, "http://127.0.0.1:9", "org/good")
    assert done.returncode == 69
    assert done.stderr.count("\n") == 1
    for part in ("http://127.0.0.1:9", "HF_ENDPOINT", "tokenyard serve ./folder"):
        assert part in done.stderr
