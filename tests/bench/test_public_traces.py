"""Public traces: their fields and units, and prompts that share what their hashes say."""

from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from bench.simulate.command import main
from bench.simulate.requests.arrivals import ArrivalsError, PromptMaker, SimRequest
from bench.simulate.requests.files import read_requests, write_requests
from bench.simulate.run import simulate
from tests.bench.test_simulate import ROOMY, one_replica

MOONCAKE = [
    {"timestamp": 27_000, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 30_500, "input_length": 1024, "output_length": 0, "hash_ids": [46, 47]},
]
BAILIAN = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 40, "output_length": 9}
BAILIAN |= {"type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091]}
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:01.5000000,374,44\n2024-05-10 00:00:00,396,109\n"
)
BURST_GPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n"
)


def lines(*entries: dict) -> str:
    return "".join(orjson.dumps(entry).decode() + "\n" for entry in entries)


def read(tmp_path: Path, text: str) -> list[SimRequest]:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_requests(path)


def short(requests: Sequence[SimRequest]) -> list[tuple[float, int, int]]:
    return [(each.arrival_s, each.prompt_len, each.max_tokens) for each in requests]


def test_times_and_lengths_are_read_in_the_units_of_each_trace(tmp_path: Path) -> None:
    assert short(read(tmp_path, lines(*MOONCAKE))) == [(0.0, 1300, 52), (3.5, 1024, 1)]
    assert short(read(tmp_path, lines(BAILIAN))) == [(0.0, 40, 9)]
    assert short(read(tmp_path, "\ufeff" + AZURE)) == [(0.0, 396, 109), (1.5, 374, 44)]
    assert short(read(tmp_path, BURST_GPT)) == [(0.0, 472, 18), (113.0, 417, 276)]  # one failed


def test_requests_of_a_trace_are_saved_and_read_as_they_were(tmp_path: Path) -> None:
    requests = read(tmp_path, lines(*MOONCAKE))
    write_requests(tmp_path / "again", requests)
    assert read_requests(tmp_path / "again") == requests


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 512])
def test_blocks_are_equal_where_all_ids_up_to_their_end_are(block_size: int) -> None:
    maker = PromptMaker()
    ids = [(1, 2, 3, 4), (1, 2, 9, 4), (7, 2, 3, 4), (1, 2)]
    prompts = [SimRequest(0.0, 64 * len(each), 1, block_ids=each, block_id_len=64) for each in ids]
    names = [maker.block_keys(each, block_size) for each in prompts]
    for left, left_ids in zip(names, ids, strict=True):
        for right, right_ids in zip(names, ids, strict=True):
            for place in range(min(64 * len(left_ids), 64 * len(right_ids)) // block_size):
                end = (place * block_size + block_size - 1) // 64 + 1
                assert (left[place] == right[place]) == (left_ids[:end] == right_ids[:end])


def test_an_endless_cache_hits_what_a_trie_over_the_ids_holds() -> None:
    """Bailian's ids are hashes of a part alone: the same one behind another prefix is not the same tokens."""
    ids = [(1, 2, 3), (1, 2, 4), (5, 2, 3), (1, 2, 3, 6), (5, 2, 3)]
    requests = [
        SimRequest(10.0 * n, 16 * len(each) + 1, 1, block_ids=each, block_id_len=16)
        for n, each in enumerate(ids)
    ]
    trie: set[tuple[int, ...]] = set()
    num_hits = 0
    for each in ids:
        prefixes = [each[:end] for end in range(1, len(each) + 1)]
        num_hits += 16 * sum(prefix in trie for prefix in prefixes)
        trie |= set(prefixes)
    result = simulate(requests, one_replica(ROOMY))
    assert result.num_prefix_hits == num_hits > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines(MOONCAKE[0] | {"hash_ids": "x"}), "hash_ids must be a list of whole numbers"),
        (lines(MOONCAKE[0], {"timestamp": -1, "input_length": 5}), r"trace:2: timestamp must be a number"),
        (lines(MOONCAKE[0] | {"input_length": 0}), "input_length must be a whole number of at least 1"),
        (AZURE + "yesterday,1,1\n", r"trace:4: TIMESTAMP must be a date and a time, not 'yesterday'"),
        (AZURE + "2024-05-10,1\n", "expected 3 cells, got 2"),
        (BURST_GPT + "1,GPT-4,many,5,5,API log\n", "Request tokens must be a whole number"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("name,age\nx,3\n", "trace:1"),
        ("[" + "x" * 200_000, "trace:1"),
        (BURST_GPT + "1,GPT-4," + "9" * 5000 + ",5,5,API log\n", "Request tokens must be a whole number"),
    ],
)
def test_a_line_that_the_trace_cannot_have_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ArrivalsError, match=message):
        read(tmp_path, text)


def test_a_trace_is_simulated_by_its_name_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(lines(*MOONCAKE))
    assert main(["--requests", str(path)]) == 0
    assert "Prefix cache hits" in capsys.readouterr().out
