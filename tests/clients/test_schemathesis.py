"""Requests made from our own OpenAPI document, right ones and wrong ones."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients.conftest import HERE, INSTALLED
from tests.e2e.serving import RunningServer, running_server

pytestmark = pytest.mark.night


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A short context: a request that names no limit of tokens ends soon."""
    options = ("--enable-admin", "--max-model-len", "24", "--num-threads", "1")
    with running_server(tmp_path_factory.mktemp("schemathesis"), *options) as server:
        yield server


# Each path is in one part. The parts are processes side by side: threads of one would share what the
# tool remembers of the document, and it is not made for that.
PARTS = ("^/v1/(chat|completions)", "^/v1/(?!chat|completions)", "^/(?!v1/)")


@pytest.mark.timeout(600)  # six thousand requests, some of them for each bound of each field
def test_whatever_the_document_allows_or_forbids_is_answered_as_it_says(server, python, tmp_path):
    """No 5xx, no status, content type or body that the document does not tell."""
    with ThreadPoolExecutor(len(PARTS)) as side_by_side:
        reports = list(side_by_side.map(lambda part: check(server.url, part, tmp_path), PARTS))
    assert not any(reports), "\n".join(reports)
    server.wait_until_idle()


def check(url: str, paths: str, folder: Path) -> str:
    """The faults of the answers of some paths; empty when there are none."""
    done = subprocess.run(
        [
            INSTALLED / "python" / "bin" / "st",
            f"--config-file={HERE / 'schemathesis.toml'}",
            "run",
            f"{url}/openapi.json",
            "--mode=all",
            "--phases=examples,coverage,fuzzing",
            "--max-examples=4",
            f"--include-path-regex={paths}",
            "--exclude-path=/admin/events",  # a stream that ends when the viewer leaves
            "--seed=1",
            "--request-timeout=20",
            "--no-color",
            # What no schema can say is refused too: an unknown model, a prompt beyond the context window.
            "--exclude-checks=positive_data_acceptance",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=560,
    )
    if done.returncode == 0:
        return ""
    # A body that was refused for its size would fill the report.
    report = "\n".join(line[:500] for line in done.stdout.splitlines())
    return report[-20_000:] + done.stderr
