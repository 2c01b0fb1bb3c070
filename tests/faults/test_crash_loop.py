"""An engine that dies again and again ends the server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT

pytestmark = pytest.mark.night


def test_an_engine_that_dies_four_times_ends_the_server_with_code_70_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.dying_server", "serve", "--port", "0", str(tiny_model)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 70
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("tokenyard: the engine process died 4 times in 300 s, last: it was killed by ")
    assert len(re.findall(r"\(pid \d+\) was killed by signal SIGKILL", ended.stderr)) == 4
    assert not list(tmp_path.iterdir())
