"""Requests made from our own OpenAPI document, right ones and wrong ones."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.clients.conftest import HERE, INSTALLED
from tests.e2e.serving import RunningServer, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A short context: a request that names no limit of tokens ends soon."""
    with running_server(
        tmp_path_factory.mktemp("schemathesis"), "--enable-admin", "--max-model-len", "128"
    ) as server:
        yield server


@pytest.mark.timeout(600)  # six thousand requests, some of them for each bound of each field
def test_whatever_the_document_allows_or_forbids_is_answered_as_it_says(server, python, tmp_path):
    """No 5xx, no status, content type or body that the document does not tell."""
    done = subprocess.run(
        [
            INSTALLED / "python" / "bin" / "st",
            f"--config-file={HERE / 'schemathesis.toml'}",
            "run",
            f"{server.url}/openapi.json",
            "--mode=all",
            "--phases=examples,coverage,fuzzing",
            "--max-examples=8",
            "--exclude-path=/admin/events",  # a stream that ends when the viewer leaves
            "--seed=1",
            "--workers=4",
            "--request-timeout=20",
            "--no-color",
            # What no schema can say is refused too: an unknown model, a prompt beyond the context window.
            "--exclude-checks=positive_data_acceptance",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=560,
    )
    # A body that was refused for its size would fill the report.
    report = "\n".join(line[:500] for line in done.stdout.splitlines())
    assert done.returncode == 0, report[-20_000:] + done.stderr
    server.wait_until_idle(within_s=5)
