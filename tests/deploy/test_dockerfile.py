"""Promises of the image, read from the Dockerfile: no Docker engine is needed."""

import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from campaigns.servers.free_ports import free_port
from engine.options.options import DECLARATIONS
from tests.deploy.dockerfile import read_instructions, read_stages, texts
from tests.deploy.wheels import INSIDE

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
BUILD, FINAL = read_stages(DOCKERFILE)
ENVIRONMENT = dict(
    word.split("=", maxsplit=1) for text in texts(FINAL, "ENV") for word in shlex.split(text) if "=" in word
)


def the_only(stage_texts: list[str]) -> str:
    (text,) = stage_texts
    return text


def health_command() -> list[str]:
    found = re.fullmatch(r"(?:--\S+ )+CMD (\[.*\])", the_only(texts(FINAL, "HEALTHCHECK")))
    assert found, "an exec-form HEALTHCHECK"
    return json.loads(found[1])


def arguments_of_the_build() -> dict[str, str]:
    given = texts(read_instructions(DOCKERFILE), "ARG")
    return dict(text.split("=", maxsplit=1) for text in given if "=" in text)


def test_both_stages_start_from_one_base_that_is_pinned_to_a_release_and_a_digest() -> None:
    arguments = arguments_of_the_build()
    assert [text.split()[0] for text in texts([*BUILD, *FINAL], "FROM")] == ["${PYTHON_IMAGE}"] * 2
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", arguments["PYTHON_IMAGE"])


def test_the_bases_python_is_one_that_the_package_allows() -> None:
    arguments = arguments_of_the_build()
    version = tuple(map(int, re.findall(r"\d+", arguments["PYTHON_IMAGE"])[:2]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version >= tuple(map(int, re.findall(r"\d+", project["requires-python"])))


def test_the_final_image_runs_as_a_numbered_user_of_group_zero() -> None:
    user, group = the_only(texts(FINAL, "USER")).split(":")
    assert user.isdigit()
    assert int(user) >= 10_000, "clear of the host's own users"
    assert group == "0"


def test_it_starts_the_server_in_exec_form_so_that_signals_reach_it() -> None:
    assert json.loads(the_only(texts(FINAL, "ENTRYPOINT"))) == ["tokenyard", "serve"]
    assert not texts(FINAL, "CMD"), "arguments belong to whoever runs it"
    assert the_only(texts(FINAL, "STOPSIGNAL")) == "SIGTERM"


def test_it_listens_where_it_says() -> None:
    assert the_only(texts(FINAL, "EXPOSE")) == ENVIRONMENT["TOKENYARD_PORT"] == "8000"
    assert ENVIRONMENT["TOKENYARD_HOST"] == "0.0.0.0"


def test_every_variable_of_ours_is_an_option_and_none_of_them_opens_the_door() -> None:
    ours = {name.removeprefix("TOKENYARD_").lower() for name in ENVIRONMENT if name.startswith("TOKENYARD_")}
    assert ours <= DECLARATIONS.keys()
    assert not ours & {"api_key", "allow_unauthenticated"}


def test_nothing_is_fetched_and_nothing_is_written_outside_of_tmp() -> None:
    assert ENVIRONMENT["HF_HUB_OFFLINE"] == "1"
    assert ENVIRONMENT["HOME"] == "/tmp"
    assert ENVIRONMENT["PYTHONDONTWRITEBYTECODE"] == "1"
    assert not texts(FINAL, "VOLUME")


def test_the_final_stage_adds_only_what_the_build_stage_made_and_for_triton_a_compiler() -> None:
    run, bill = texts(FINAL, "RUN")
    assert bill.endswith("> /opt/tokenyard/sbom.cdx.json"), "of this stage: the other one has compilers"
    assert re.fullmatch(r'if \[ "\$DEVICE" = cuda \]; then .* gcc libc6-dev .*; fi', re.sub(r"\s+", " ", run))
    assert not texts(FINAL, "ADD") + texts(BUILD, "ADD")
    assert all(text.startswith("--from=build ") for text in texts(FINAL, "COPY"))


def test_the_kernels_are_built_among_the_modules_that_the_final_stage_gets() -> None:
    """`python -m` alone looks into the working directory first, which holds the sources and stays behind."""
    run = next(text for text in texts(BUILD, "RUN") if "worker.cpu.kernel_build" in text)
    assert "python -P -m tokenyard.inside.worker.cpu.kernel_build --in-place" in run
    assert run.index("pip install") < run.index("worker.cpu.kernel_build")


def test_no_secret_and_no_floating_tag_is_in_it() -> None:
    text = DOCKERFILE.read_text()
    assert ":latest" not in text
    assert not re.search(r"(?i)(token|password|secret|api_key)\s*=\s*[\"']?\w", text.replace("TOKENYARD", ""))
    assert "://" not in text, "addresses of indexes are given at build time"


def test_everything_that_is_copied_exists_and_is_let_through_to_the_build() -> None:
    allowed, denied = ignore_rules()
    assert denied[0] == "*", "all is kept out but what is named"
    sources = [source for text in texts(BUILD, "COPY") for source in text.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in allowed, source
    assert set(allowed) == set(sources), "let in, but never copied"


@pytest.mark.parametrize("path", ["tests", ".git", "docs", "deploy", ".venv", ".ci", "scripts", "campaigns"])
def test_what_the_image_does_not_need_never_reaches_the_build(path: str) -> None:
    assert path not in ignore_rules()[0]


def test_compiled_python_stays_out() -> None:
    _, denied = ignore_rules()
    assert any(fnmatch.fnmatch("engine/__pycache__", rule) for rule in denied[1:])


def test_every_package_is_copied() -> None:
    packages = {"tokenyard", *INSIDE}
    copied = {text.split()[0] for text in texts(BUILD, "COPY")}
    assert packages <= copied


@pytest.mark.parametrize(
    ("image", "without_digest", "code"),
    [
        ("python:3.11.13-slim-bookworm", "no", 1),
        ("python:3.11.13-slim-bookworm", "yes", 0),
        ("python:3.11.13-slim-bookworm@sha256:" + "0" * 64, "no", 0),
    ],
)
def test_a_base_without_a_digest_stops_the_build_unless_that_is_asked_for(
    image: str, without_digest: str, code: int
) -> None:
    check = next(text for text in texts(BUILD, "RUN") if "sha256" in text)
    environment = {"PYTHON_IMAGE": image, "BASE_WITHOUT_DIGEST": without_digest}
    ran = subprocess.run(["sh", "-c", check], env=environment, capture_output=True, text=True, timeout=30)
    assert ran.returncode == code
    assert ("--build-arg PYTHON_IMAGE=<image>@sha256:<digest>" in ran.stderr) == bool(code)


def installing(device: str, tmp_path: Path, *, has_cpu_torch: bool) -> "subprocess.CompletedProcess[str]":
    """The step that installs the locks, with a pip that only says what it was asked for."""
    step = next(text for text in texts(BUILD, "RUN") if "torch-cpu.txt" in text)
    refusal = "" if has_cpu_torch else 'case "$*" in *torch-cpu*) exit 1;; esac'
    (tmp_path / "pip").write_text(f'#!/bin/sh\necho "$*"\n{refusal}\n')
    (tmp_path / "pip").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DEVICE": device,
        "TORCH_INDEX_URL": "cpu-index",
    }
    return subprocess.run(["sh", "-c", step], env=environment, capture_output=True, text=True, timeout=30)


def test_only_torch_comes_from_the_index_of_torch_and_all_by_its_hash(tmp_path: Path) -> None:
    torch, others = installing("cpu", tmp_path, has_cpu_torch=True).stdout.splitlines()
    assert torch == "install --no-deps --require-hashes --index-url cpu-index -r deploy/locks/torch-cpu.txt"
    assert others == "install --no-deps --require-hashes -r deploy/locks/cpu.txt"


def test_without_a_cpu_build_of_torch_the_image_for_a_cpu_stops_with_the_reason(tmp_path: Path) -> None:
    stopped = installing("cpu", tmp_path, has_cpu_torch=False)
    assert stopped.returncode == 1
    assert "gigabytes of CUDA" in stopped.stderr
    assert "deploy/locks/cpu.txt" not in stopped.stdout


def test_the_image_for_cuda_has_its_own_lock_and_another_device_is_refused(tmp_path: Path) -> None:
    cuda = installing("cuda", tmp_path, has_cpu_torch=True)
    assert cuda.stdout == "install --no-deps --require-hashes -r deploy/locks/cuda.txt\n"
    assert installing("tpu", tmp_path, has_cpu_torch=True).returncode == 1


def ignore_rules() -> tuple[list[str], list[str]]:
    """Paths let in and kept out, in the order of .dockerignore."""
    lines = [line.strip() for line in (ROOT / ".dockerignore").read_text().splitlines()]
    rules = [line for line in lines if line and not line.startswith("#")]
    return [rule[1:] for rule in rules if rule.startswith("!")], [rule for rule in rules if rule[0] != "!"]


@contextmanager
def probed_server(status: int) -> Iterator[tuple[int, list[str]]]:
    """Its port, and the paths that it was asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, paths
        finally:
            server.shutdown()
            thread.join()


def run_health_command(**environment: str) -> int:
    python, *arguments = health_command()
    assert python == "python"
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        stderr=subprocess.DEVNULL,
        timeout=30,
    ).returncode


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_asks_for_readiness(status: int, code: int) -> None:
    with probed_server(status) as (port, paths):
        assert run_health_command(TOKENYARD_PORT=str(port), http_proxy="http://127.0.0.1:9") == code
    assert paths == ["/health/ready"]


def test_the_health_check_fails_where_nobody_listens() -> None:
    assert run_health_command(TOKENYARD_PORT=str(free_port())) == 1
