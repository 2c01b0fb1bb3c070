"""Workloads: the same for the same seed, and as long as they were asked to be."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bench.load.workload import (
    ONE_TOKEN_A_WORD,
    Arrivals,
    Pace,
    Shape,
    WordCost,
    WorkloadError,
    plan,
    read_prompts,
    synthetic_prompts,
)

SHAPE = Shape(num_prompts=20, input_len=50, output_len=7, shared_prefix_len=30)


def test_prompts_have_the_length_asked_for_and_share_their_beginning() -> None:
    prompts = synthetic_prompts(SHAPE, ONE_TOKEN_A_WORD, seed=1)
    split = [prompt.split(" ") for prompt, _ in prompts]
    assert {len(each) for each in split} == {50}
    assert len({tuple(each[:30]) for each in split}) == 1
    assert len({tuple(each[30:]) for each in split}) == 20
    assert {max_tokens for _, max_tokens in prompts} == {7}


def test_words_that_cost_more_tokens_make_shorter_prompts() -> None:
    cost = WordCost(per_word=2.0, per_prompt=10.0)
    prompts = synthetic_prompts(SHAPE, cost, seed=1)
    assert {len(prompt.split(" ")) for prompt, _ in prompts} == {20}


def test_a_seed_makes_the_same_workload_and_another_one_a_new_one() -> None:
    assert synthetic_prompts(SHAPE, ONE_TOKEN_A_WORD, 1) == synthetic_prompts(SHAPE, ONE_TOKEN_A_WORD, 1)
    assert synthetic_prompts(SHAPE, ONE_TOKEN_A_WORD, 1) != synthetic_prompts(SHAPE, ONE_TOKEN_A_WORD, 2)


def test_arrivals_are_poisson() -> None:
    planned = plan([("a", 1)] * 5000, pace=Pace(requests_per_s=10.0), priority_mix=(), seed=0)
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(planned)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert planned[0].arrival_s == 0.0
    assert mean == pytest.approx(0.1, rel=0.05)
    assert variance == pytest.approx(mean**2, rel=0.1)


def test_constant_arrivals_have_even_distances() -> None:
    pace = Pace(requests_per_s=4.0, arrivals=Arrivals.CONSTANT)
    planned = plan([("a", 1)] * 5, pace=pace, priority_mix=(), seed=0)
    assert [each.arrival_s for each in planned] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


def test_bursts_keep_the_rate() -> None:
    pace = Pace(requests_per_s=4.0, arrivals=Arrivals.BURST, burst_size=3)
    planned = plan([("a", 1)] * 7, pace=pace, priority_mix=(), seed=0)
    assert [each.arrival_s for each in planned] == pytest.approx([0, 0, 0, 0.75, 0.75, 0.75, 1.5])


def test_priorities_are_mixed_by_weight() -> None:
    planned = plan([("a", 1)] * 2000, pace=None, priority_mix=((0, 3.0), (-5, 1.0)), seed=0)
    assert {each.priority for each in planned} == {0, -5}
    assert sum(each.priority == 0 for each in planned) == pytest.approx(1500, rel=0.05)


def test_a_prompt_file_is_taken_once_or_as_often_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "max_tokens": 3}\n')
    assert read_prompts(path, num_prompts=None, output_len=9) == [("one", 9), ("two", 3)]
    assert read_prompts(path, num_prompts=3, output_len=9) == [("one", 9), ("two", 3), ("one", 9)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "holds no prompts"),
        ("{", ":1: "),
        ("[1]", "expected"),
        (json.dumps({"prompt": 1}), "expected"),
        (json.dumps({"prompt": "a", "max_tokens": 0}), "max_tokens"),
        (json.dumps({"prompt": "a", "max_tokens": True}), "max_tokens"),
        (json.dumps({"prompt": "a", "max_tokens": 10**30}), "max_tokens"),
        (json.dumps({"prompt": "\ud800"}), ":1: "),
        pytest.param("[" * 100_000, ":1: ", id="deep"),
        (json.dumps({"prompt": "a", "temperature": 1}), "unknown field 'temperature'"),
    ],
)
def test_a_bad_prompt_file_is_refused_with_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(WorkloadError, match=complaint):
        read_prompts(path, num_prompts=None, output_len=9)


def test_a_missing_prompt_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot read"):
        read_prompts(tmp_path / "none", num_prompts=None, output_len=9)
