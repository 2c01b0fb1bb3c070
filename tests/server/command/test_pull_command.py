"""`tokenyard pull` against a stand-in for the hub: what arrives, what is refused, what is resumed."""

import contextlib
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

from engine import hub_answers
from engine.hub_answers import HubLies, check_commit, check_file, check_text
from engine.options.engine_config import resolve
from engine.options.options import Options
from worker.checkpoint.checksums import Checksums

pytestmark = pytest.mark.night

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
        self.sha, self.header_commit = COMMIT, COMMIT
        self.headers: dict[str, str] = {}
        """Headers of all files, in the place of true ones."""
        self.announced: int | None = None
        """Size of each file in the list, in the place of the true one."""
        self.listed: dict[str, object] = {}
        """More of each file in the list."""
        self.page = b""
        """The answer about a model, in the place of the true one."""
        self.is_endless = False
        self.sent = 0
        self.elsewhere = ""
        """Another hub, to which requests for files are sent on."""
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
            return self._send(self.server.page or json.dumps(made).encode())
        files = self.server.models.get("/".join(parts[:2]), {})
        content = files.get("/".join(parts[4:]))
        if content is None:
            return self._missing()
        if self.server.elsewhere:
            self.send_response(302)
            self.send_header("Location", self.server.elsewhere + self.path)
            self.send_header("X-Repo-Commit", COMMIT)
            etag = {"X-Linked-Etag": hashlib.sha256(content).hexdigest()}
            for name, value in (etag | self.server.headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if self.server.is_endless and self.command == "GET":
            return self._send_for_ever()
        return self._send(content, self.headers.get("range", ""))

    def _info(self, parts: list[str], files: dict[str, bytes]) -> dict[str, object]:
        siblings = []
        for name, content in files.items():
            digest = hashlib.sha256(b"other" if self.server.lies else content).hexdigest()
            lfs = {"lfs": {"sha256": digest, "size": len(content), "pointerSize": 1}}
            large = name.endswith((".safetensors", ".gguf"))
            size = len(content) if self.server.announced is None else self.server.announced
            siblings.append({"rfilename": name, "size": size, **(lfs if large else {})} | self.server.listed)
        name = "/".join(parts[2:4])
        return {
            "id": name,
            "modelId": name,
            "sha": self.server.sha,
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
        headers = {"Content-Length": str(len(content)), "ETag": f'"{etag}"'}
        headers |= {"X-Repo-Commit": self.server.header_commit, "Accept-Ranges": "bytes"}
        for name, value in (headers | self.server.headers).items():
            self.send_header(name, value)
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

    def _send_for_ever(self) -> None:
        """Send up to 256 MiB without an announced length."""
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while self.server.sent < 256 << 20:
                self.wfile.write(bytes(1 << 20))
                self.server.sent += 1 << 20


@pytest.fixture
def other_hub() -> Iterator[Hub]:
    yield from _run()


@pytest.fixture
def hub() -> Iterator[Hub]:
    yield from _run()


def _run() -> Iterator[Hub]:
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


def test_a_cache_that_takes_nothing_is_no_fault_of_the_hub(hub, tmp_path) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    done = pull(home, hub.url, "org/good")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("tokenyard pull: [Errno"), done.stderr
    assert str(home) in last
    assert "HF_HOME" in last


def written_by(home: Path) -> set[str]:
    """Files near the cache, with those that a transfer leaves anywhere above it."""
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


def assert_refused(done: subprocess.CompletedProcess[str], part: str, home: Path) -> None:
    """One line, and no file but the library's own marks in its cache."""
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1, done.stderr
    assert last.startswith("tokenyard pull: the hub answers with "), done.stderr
    assert part in last
    assert "Traceback" not in done.stderr
    kept = ("CACHEDIR.TAG", ".lock", ".incomplete")
    inside = {each for each in written_by(home.parent) if not each.endswith(kept)}
    assert all(each.startswith(f"{home.name}/hub/models--org--good/") for each in inside), inside


@pytest.mark.parametrize(
    ("header", "etag"),
    [
        ("ETag", "../../x"),
        ("X-Linked-Etag", 'W/"../../../../x"'),
    ],
)
def test_an_etag_that_could_be_a_path_is_refused(hub, tmp_path, header, etag) -> None:
    hub.headers = {header: etag}
    home = tmp_path / "one" / "two" / "home"
    assert_refused(pull(home, hub.url, "org/good"), "ETag", home)


def test_a_commit_that_could_be_a_path_is_refused(hub, tmp_path) -> None:
    hub.sha = "../"
    home = tmp_path / "one" / "home"
    assert_refused(pull(home, hub.url, "org/good"), "commit", home)


def test_a_file_of_another_commit_than_was_asked_for_is_refused(hub, tmp_path) -> None:
    hub.header_commit = "../../x"
    home = tmp_path / "one" / "home"
    assert_refused(pull(home, hub.url, "org/good"), "commit '../../x'", home)


def test_a_name_that_leads_out_of_the_folder_is_refused(hub, tmp_path) -> None:
    hub.models["org/good"] = {**GOOD, "../x.json": b"{}"}
    home = tmp_path / "one" / "home"
    assert_refused(pull(home, hub.url, "org/good"), "a file of the name", home)


def test_no_other_name_commit_or_etag_can_be_a_path() -> None:
    for name in ("a/../../x.json", "/x.json", "a\\x.json", "x" * 300 + ".json"):
        with pytest.raises(HubLies, match="a file of the name"):
            check_file(name, 1, None)
    with pytest.raises(HubLies, match="a file of the name"):
        check_text(["x.json"])
    for commit in ("", "A" * 40, "0" * 10_000):
        with pytest.raises(HubLies, match="the commit"):
            check_commit(commit)
    for etag in ("x/../../y", "/tmp/absolute", '"a"b"', "x" * 10_000, ".."):
        assert not hub_answers._ETAG.fullmatch(etag)


@pytest.mark.parametrize(
    ("listed", "part"),
    [
        ({"rfilename": 5}, "a file of the name '5'"),
        ({"size": 10**4200}, "a size of config.json"),
    ],
)
def test_a_list_of_files_that_is_none_is_refused(hub, tmp_path, listed, part) -> None:
    hub.listed = listed
    home = tmp_path / "one" / "home"
    assert_refused(pull(home, hub.url, "org/good"), part, home)


def test_an_answer_nested_too_deep_is_one_line(hub, tmp_path) -> None:
    hub.page = b"[" * 100_000
    done = pull(tmp_path, hub.url, "org/good")
    assert (done.returncode, done.stderr.count("\n")) == (69, 1), done.stderr


def test_names_from_a_hub_command_no_terminal(hub, tmp_path) -> None:
    hub.models["org/good"] = {"\x1b]0;owned\x07.bin": b""}
    done = pull(tmp_path, hub.url, "org/good")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "\x1b" not in done.stderr
    assert r"\x1b]0;owned\x07.bin" in done.stderr


@pytest.mark.parametrize("announced", [1000, -1])
def test_a_hub_that_sends_more_than_it_announced_is_stopped_there(hub, tmp_path, announced) -> None:
    hub.announced = announced
    hub.is_endless = True
    home = tmp_path / "home"
    assert_refused(pull(home, hub.url, "org/good"), "a size of" if announced < 0 else "more than", home)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 100_000
    assert hub.sent < 128 << 20, "the connection was closed"


def test_a_hub_that_leads_to_another_host_is_checked_there_too(hub, other_hub, tmp_path) -> None:
    hub.elsewhere = other_hub.url
    home = tmp_path / "home"
    hub.headers = {"X-Linked-Etag": "../../../x"}
    assert_refused(pull(home, hub.url, "org/good"), "ETag", home)
    hub.headers = {}
    other_hub.is_endless = True
    assert_refused(pull(home, hub.url, "org/good"), "more than", home)
    other_hub.is_endless = False
    assert pull(home, hub.url, "org/good").returncode == 0


def test_a_compressed_answer_is_refused_before_it_is_written(hub, tmp_path) -> None:
    hub.headers = {"Content-Encoding": "gzip"}
    home = tmp_path / "home"
    assert_refused(pull(home, hub.url, "org/good"), "compressed", home)
