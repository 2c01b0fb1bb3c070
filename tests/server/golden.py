"""Streams as files: what a client reads, to the letter, but for ids and times.

To write them anew after a change that is meant: GOLDEN=write python -m pytest tests/server -k golden
"""

import os
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "golden"


def normalized(stream: str) -> str:
    """The same stream with fixed ids, times and fingerprints, and one comment for each silence."""
    stream = re.sub(r"(: keep-alive\n\n)+", r"\1", stream)
    stream = re.sub(r"\b(cmpl|chatcmpl)-[0-9a-f]{32}", r"\1-ID", stream)
    stream = re.sub(r'"created":\d+', '"created":0', stream)
    stream = re.sub(r"\bfp_[0-9a-f]{12}", "fp_0", stream)
    return re.sub(r"request id [\w-]+", "request id ID", stream)


def check_golden(name: str, stream: str) -> None:
    """Hold a stream against tests/golden/NAME.sse."""
    path = FOLDER / f"{name}.sse"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(normalized(stream), encoding="utf-8")
    assert normalized(stream) == path.read_text(encoding="utf-8")
