"""The command line of the simulator, from options to exit status."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.simulate.command import main
from tests.bench.traces import traced

SMALL = ("--num-requests", "60", "--prompt-len", "uniform:5:40", "--output-len", "uniform:1:20")


def test_variants_stand_side_by_side_and_are_written_and_drawn(tmp_path: Path, capsys) -> None:
    status = main(
        [
            *(*SMALL, "--request-rate", "300", "--priority-mix", "0:1,10:4", "--num-blocks", "40"),
            *("--compare", "fcfs,priority,priority+aging=10,fcfs+replicas=2", "--slo-ttft-ms", "200"),
            *("--json", str(tmp_path / "run.json"), "--plots", str(tmp_path / "plots")),
        ]
    )
    assert status == 0
    out = capsys.readouterr().out
    assert out.splitlines()[4].split() == ["fcfs", "priority", "priority", "fcfs"]
    assert out.splitlines()[5].split() == ["aging=10", "replicas=2"]
    assert "priority 10" in out
    assert "within the SLO" in out
    assert "Simulated 240 requests" in out
    document = json.loads((tmp_path / "run.json").read_text())
    assert [run["name"] for run in document["runs"]] == [
        *("fcfs", "priority", "priority+aging=10", "fcfs+replicas=2")
    ]
    assert {each["num_arrived"] for run in document["runs"] for each in run["classes"]} == {
        each["num_arrived"] for each in document["runs"][0]["classes"]
    }
    assert document["parameters"]["prompt_len"] == "uniform:5:40"
    for name in ("ttft.svg", "queue.svg"):
        ElementTree.fromstring((tmp_path / "plots" / name).read_text())
    assert "time to first token, ms" in (tmp_path / "plots" / "ttft.svg").read_text()
    assert "SLO " in (tmp_path / "plots" / "ttft.svg").read_text()


def test_requests_can_be_saved_and_simulated_again(tmp_path: Path, capsys) -> None:
    path = str(tmp_path / "requests.jsonl")
    assert main([*SMALL, "--prefix-groups", "3", "--prefix-len", "4", "--save-requests", path]) == 0
    drawn = capsys.readouterr().out.splitlines()
    assert main(["--requests", path]) == 0
    read = capsys.readouterr().out.splitlines()
    assert read[1:-1] == drawn[1:-1]  # all but where they came from, and how fast it was


def test_step_times_come_from_a_trace(tmp_path: Path, capsys) -> None:
    trace = str(traced(tmp_path))
    assert main([*SMALL, "--fit", trace]) == 0
    assert "4 ms + 30 us a token + 20 us a decode + 1000 ns a context token" in capsys.readouterr().out
    assert main([*SMALL, "--fit", trace, "--step-base-ms", "3"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num-requests", "0"), "expected a whole number from 1"),
        (("--prompt-len", "gauss:1:2"), "lognormal:MEDIAN:SIGMA"),
        (("--scheduling-policy", "sjf"), "expected fcfs or priority"),
        (("--max-num-batched-tokens", "8"), "must be at least max_num_seqs"),
        (("--compare", "fcfs,sjf"), "expected base, fcfs, priority"),
        (("--requests", "missing.jsonl"), "cannot read missing.jsonl"),
        (("--requests", "missing.jsonl", "--num-requests", "5"), "--num-requests is for drawn requests"),
        (("--fit", "missing.jsonl"), "cannot read missing.jsonl"),
        (("--priority-mix", "high:1"), "expected PRIORITY:WEIGHT"),
        (("--router", "random"), "least-waiting"),
        (("--json", "missing/run.json"), "cannot write missing/run.json"),
        (
            (
                "--step-base-ms",
                "0",
                "--step-token-us",
                "0",
                "--step-decode-us",
                "0",
                "--step-context-ns",
                "0",
            ),
            "a step must take some time",
        ),
    ],
)
def test_a_mistake_ends_with_2_and_says_what_is_right(
    words: tuple[str, ...], message: str, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(list(words)) == 2
    assert message in capsys.readouterr().err


def test_help_is_0(capsys) -> None:
    assert main(["--help"]) == 0
    assert "--compare" in capsys.readouterr().out
