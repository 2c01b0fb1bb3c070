"""Inputs of a simulation: lengths, arrivals, request files, variants."""

import random
import statistics
from dataclasses import fields, replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

from bench.simulate.requests.arrivals import ArrivalsError, LengthDistribution, PromptMaker, SimRequest
from bench.simulate.requests.files import read_requests, write_requests
from bench.simulate.router import RouterKind
from bench.simulate.setup import SetupError, settable_fields, variant
from scheduler.config import SchedulerConfig, SchedulingPolicy
from tests.bench.test_simulate import one_replica, workload


def draws(text: str, num: int = 4000) -> list[int]:
    rng = random.Random(1)
    lengths = LengthDistribution.parse(text)
    return [lengths.draw(rng) for _ in range(num)]


def test_lengths_follow_their_distribution() -> None:
    assert set(draws("128")) == {128}
    assert set(draws("uniform:3:5")) == {3, 4, 5}
    assert statistics.mean(draws("exponential:200")) == pytest.approx(200, rel=0.05)
    assert statistics.median(draws("lognormal:256:1")) == pytest.approx(256, rel=0.05)
    assert max(draws("lognormal:256:1:300")) == 300
    assert min(draws("exponential:1")) == 1


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "x", "uniform:5", "uniform:5:3", "lognormal:9", "gauss:3:4", "exponential:nan"]
)
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|number|low end"):
        LengthDistribution.parse(text)


def gaps(**changes: object) -> list[float]:
    arrivals = [request.arrival_s for request in workload(num_requests=4000, **changes)]
    return [after - before for before, after in pairwise(arrivals)]


def test_arrivals_keep_their_rate_and_come_in_bursts_where_asked() -> None:
    poisson, bursty = gaps(), gaps(burstiness=0.1)
    assert statistics.mean(poisson) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(poisson) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.mean(bursty) == pytest.approx(1 / 20, rel=0.15)
    assert statistics.stdev(bursty) > 2.5 / 20
    assert set(gaps(rate_per_s=inf)) == {0.0}


def test_a_workload_is_the_same_each_time_and_one_option_leaves_the_other_draws_alone() -> None:
    requests = list(workload())
    assert list(workload()) == requests
    mixed = list(workload(priority_mix=((0, 1.0), (7, 1.0)), tenant_mix=(("a", 1.0), ("b", 1.0))))
    assert {request.priority for request in mixed} == {0, 7}
    assert {request.tenant for request in mixed} == {"a", "b"}
    assert [request._replace(priority=0, tenant="") for request in mixed] == requests


def test_requests_written_to_a_file_are_read_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    drawn = list(workload(num_prefix_groups=3, prefix_len=8, priority_mix=((0, 1.0), (7, 1.0))))
    write_requests(path, drawn)
    assert read_requests(path) == drawn


def test_a_request_file_may_say_less_or_bring_its_prompts(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"arrival_s": 3, "prompt": "equal beginnings, one end", "output_len": 5, "max_tokens": 9}\n'
        "\n"
        '{"arrival_s": 1.5, "prompt_len": 7, "max_tokens": 9, "priority": -2, "tenant": "a"}\n'
        '{"arrival_s": 4, "prompt": "equal beginnings, another", "output_len": 5}\n'
        '{"arrival_s": 5, "prompt": [1, 2, 3], "output_len": 5}\n'
    )
    first, second, third, fourth = read_requests(path)
    assert first == SimRequest(arrival_s=1.5, prompt_len=7, max_tokens=9, priority=-2, tenant="a")
    assert (second.arrival_s, second.max_tokens, second.prompt_len) == (3.0, 5, 7)
    assert second.prompt[:4] == third.prompt[:4]
    assert second.prompt != third.prompt
    assert fourth.prompt == (1, 2, 3)
    write_requests(tmp_path / "again", [second, fourth])
    assert read_requests(tmp_path / "again") == [second, fourth]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "expected an object"),
        ("{", "requests:1"),
        ('{"arrival_s": 1, "prompt_len": 3}', "neither max_tokens nor output_len"),
        ('{"prompt_len": 3, "max_tokens": 3}', "arrival_s must be"),
        ('{"arrival_s": true, "prompt_len": 3, "max_tokens": 3}', "arrival_s must be"),
        ('{"arrival_s": 1, "max_tokens": 3}', "prompt_len must be"),
        ('{"arrival_s": 1, "prompt_len": 3, "max_tokens": 0}', "max_tokens must be"),
        ('{"arrival_s": 1, "prompt": "", "max_tokens": 3}', "prompt must be"),
        ('{"arrival_s": 1, "prompt_len": 3, "max_tokens": 3, "model": "x"}', "unknown field 'model'"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "requests"
    path.write_text(line + "\n")
    with pytest.raises(ArrivalsError, match=message):
        read_requests(path)


def test_prompts_share_the_tokens_of_their_group_and_no_others() -> None:
    maker = PromptMaker()
    request = SimRequest(arrival_s=0.0, prompt_len=10, max_tokens=1, prefix_group="a", prefix_len=6)
    one, two = maker.token_ids(request, 1), maker.token_ids(request, 2)
    longer = maker.token_ids(request._replace(prompt_len=20, prefix_len=12), 3)
    other = maker.token_ids(request._replace(prefix_group="b"), 4)
    alone = maker.token_ids(request._replace(prefix_group=""), 5)
    assert [len(each) for each in (one, two, longer, other, alone)] == [10, 10, 20, 10, 10]
    assert one[:6] == two[:6] == longer[:6]
    assert one[6] != two[6]
    assert len({one[0], other[0], alone[0]}) == 3
    assert len(maker.token_ids(request._replace(prefix_len=99), 6)) == 10


def test_a_variant_changes_what_its_words_say() -> None:
    base = one_replica()
    changed = variant(base, "priority+aging=10+num_blocks=77+load=1.5+replicas=3+router=prefix-aware")
    assert changed.config == replace(
        base.config, policy=SchedulingPolicy.PRIORITY, priority_aging_s=10.0, num_blocks=77
    )
    assert (changed.load, changed.num_replicas, changed.router) == (1.5, 3, RouterKind.PREFIX_AWARE)
    assert variant(base, "base").config == base.config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sjf", "expected base, fcfs, priority"),
        ("speed=9", "there is no such setting"),
        ("num_blocks=many", "expected a whole number"),
        ("num_blocks=0", "at least 1"),
        ("prefix_caching=maybe", "expected on or off"),
        ("replicas=0", "at least 1"),
        ("load=0", "above 0"),
        ("router=random", "least-waiting"),
    ],
)
def test_a_variant_that_does_not_exist_says_what_there_is(text: str, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        variant(one_replica(), text)


def test_the_share_of_a_large_crowd_is_that_of_the_server() -> None:
    setup = variant(one_replica(), "least_prefill_share=0.5+large_crowd_prefill_share=0.85")
    assert setup.config.large_crowd_prefill_share == 0.85


def test_every_number_and_choice_of_the_scheduler_can_be_set() -> None:
    known = {"num_blocks", "max_num_seqs", "policy", "prefix_caching", "watermark", "priority_aging_s"}
    known |= {"large_crowd_prefill_share"}  # a number that may be none
    assert known <= set(settable_fields()) <= {each.name for each in fields(SchedulerConfig)}
