"""The arithmetic of a report, on records whose numbers are known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.goodput import parse_limits
from bench.load.report import distribution_ms, percentile, render, summarize
from bench.load.request_record import COMPLETED, RequestRecord

RECORD = RequestRecord(
    index=0,
    priority=0,
    outcome=COMPLETED,
    message="",
    start_s=1.0,
    late_s=0.0,
    ttft_s=0.1,
    e2e_s=0.5,
    chunk_gaps_s=(0.1, 0.3),
    tpot_s=0.08,
    num_prompt_tokens=10,
    num_cached_tokens=4,
    num_output_tokens=6,
    finish_reason="length",
)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_a_distribution_is_in_milliseconds() -> None:
    found = distribution_ms([0.001 * n for n in range(101)])
    assert found is not None
    assert (found.count, found.p50, found.p90, found.p99, found.max) == pytest.approx((101, 50, 90, 99, 100))
    assert distribution_ms([]) is None


def test_rates_are_over_the_time_from_first_sent_to_last_end() -> None:
    late = replace(RECORD, index=1, start_s=2.0, e2e_s=1.0, ttft_s=0.3)
    summary = summarize([RECORD, late], num_planned=2)
    assert summary.duration_s == 2.0
    assert summary.requests_per_s == 1.0
    assert summary.output_tokens_per_s == 6.0
    assert summary.total_tokens_per_s == 16.0
    assert summary.tokens_per_chunk == 2.0
    assert summary.num_cached_tokens == 8
    assert summary.latencies.ttft_ms is not None
    assert summary.latencies.ttft_ms.mean == pytest.approx(200)
    assert summary.latencies.chunk_gap_ms is not None
    assert summary.latencies.chunk_gap_ms.count == 4


def test_failures_are_counted_by_kind_and_kept_out_of_latencies() -> None:
    refused = replace(
        RECORD, index=1, outcome="HTTP 429 busy", message="later", ttft_s=None, chunk_gaps_s=(), e2e_s=9.0
    )
    broken = replace(RECORD, index=2, outcome="connection reset", message="gone", ttft_s=7.0)
    summary = summarize([RECORD, refused, broken, replace(refused, message="again")], num_planned=6)
    assert summary.failures == {"HTTP 429 busy": 2, "connection reset": 1}
    assert summary.example_messages["HTTP 429 busy"] == "later"
    assert (summary.num_completed, summary.num_failed, summary.num_sent) == (1, 3, 4)
    assert summary.latencies.ttft_ms is not None
    assert summary.latencies.ttft_ms.max == pytest.approx(100)
    text = render(summary)
    assert "2 x HTTP 429 busy: later" in text
    assert "Not sent         2" in text


def test_a_completed_request_without_tokens_has_no_first_one() -> None:
    empty = replace(RECORD, ttft_s=None, tpot_s=None, chunk_gaps_s=(), num_output_tokens=0)
    latencies = summarize([RECORD, empty], num_planned=2).latencies
    assert latencies.ttft_ms is not None
    assert latencies.e2e_ms is not None
    assert (latencies.ttft_ms.count, latencies.e2e_ms.count) == (1, 2)


def test_priorities_are_told_apart_where_there_are_several() -> None:
    assert summarize([RECORD], num_planned=1).by_priority == {}
    urgent = replace(RECORD, index=1, priority=-5, ttft_s=0.01)
    by_priority = summarize([RECORD, urgent], num_planned=2).by_priority
    assert list(by_priority) == [-5, 0]
    assert by_priority[-5].ttft_ms is not None
    assert by_priority[-5].ttft_ms.p50 == pytest.approx(10)


def test_a_run_of_nothing_but_failures_still_has_a_report() -> None:
    failed = replace(RECORD, outcome="no connection", ttft_s=None, chunk_gaps_s=(), tpot_s=None)
    assert "Completed        0 of 1" in render(summarize([failed], num_planned=1))
    assert "Completed        0 of 5" in render(summarize([], num_planned=5))


def test_the_pause_of_a_request_is_its_longest_gap() -> None:
    steady = replace(RECORD, index=1, chunk_gaps_s=(0.2, 0.2, 0.2))
    single = replace(RECORD, index=2, chunk_gaps_s=())
    latencies = summarize([RECORD, steady, single], num_planned=3).latencies
    assert latencies.pause_ms is not None
    assert (latencies.pause_ms.count, latencies.pause_ms.max) == (2, pytest.approx(300))
    assert latencies.pause_ms.p50 == pytest.approx(250)


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ("ttft:100", 1),
        ("ttft:99", 0),
        ("tpot:80", 2),
        ("tpot:79", 0),
        ("itl:300", 2),
        ("itl:299", 0),  # the longest gap counts, not the mean of 200 ms
        ("e2el:500", 2),
        ("e2el:499", 0),
        ("ttft:1000,itl:299", 0),
        ("ttft:1000,itl:300,e2el:500,tpot:80", 2),
    ],
)
def test_goodput_counts_the_requests_that_keep_every_limit(limits: str, num_good: int) -> None:
    slow_start = replace(RECORD, index=1, start_s=1.5, ttft_s=0.4)
    refused = replace(RECORD, index=2, outcome="HTTP 429", ttft_s=None, chunk_gaps_s=(), e2e_s=0.001)
    summary = summarize([RECORD, slow_start, refused], num_planned=4, limits=parse_limits(limits))
    assert summary.goodput is not None
    assert summary.goodput.num_good == num_good
    assert summary.goodput.requests_per_s == num_good / 1.0  # over the whole run, of one second
    assert f"{num_good} of 4 requests within " in render(summary)


def test_a_request_without_tokens_keeps_no_limit_of_the_first_one() -> None:
    empty = replace(RECORD, ttft_s=None, tpot_s=None, chunk_gaps_s=(), num_output_tokens=0)
    for limits, num_good in (("ttft:100000", 0), ("itl:1,tpot:1", 1)):
        goodput = summarize([empty], num_planned=1, limits=parse_limits(limits)).goodput
        assert goodput is not None
        assert goodput.num_good == num_good
