"""The search for the highest load, on a trace that is served in time however fast it comes."""

import json
from pathlib import Path

import pytest

from campaigns.separation import main


def test_a_few_requests_are_served_at_any_load_and_the_search_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "few.jsonl"
    requests = [
        {"timestamp": 1000 * number, "input_length": 20, "output_length": 3, "hash_ids": [number]}
        for number in range(3)
    ]
    trace.write_text("\n".join(map(json.dumps, requests)))
    assert main([str(trace), "--replicas", "2"]) == 0
    _, *table = capsys.readouterr().out.splitlines()
    together, one_ratio, other_rates = 4, 1, 3
    assert len(table) == together + one_ratio + other_rates
