"""docs/security.md names tests that are there, and open paths that are open."""

import re

from server.endpoints import OPEN_PATHS
from tests.deploy.manifests import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_promise_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| .+ \| (`tests/.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 15
    for path in re.findall(r"`(tests/[^`]+)`", "".join(rows)):
        assert "def test_" in (ROOT / path).read_text(), path


def test_nothing_is_open_but_probes_and_metrics() -> None:
    assert {"/health", "/health/live", "/health/ready", "/ping", "/metrics"} == OPEN_PATHS
