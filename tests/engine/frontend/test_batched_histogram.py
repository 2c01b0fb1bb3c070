"""A histogram for many equal values at once."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from engine.frontend.batched_histogram import BatchedHistogram

BUCKETS = (0.002, 0.5, 1.0, 5.0)


def test_the_page_is_that_of_the_librarys_own_histogram() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    batched = BatchedHistogram("a:b_seconds", "Some text", buckets=BUCKETS, registry=ours)
    plain = Histogram("a:b_seconds", "Some text", buckets=BUCKETS, registry=theirs)
    empty = generate_latest(theirs)
    assert [line for line in generate_latest(ours).splitlines() if b"_created" not in line] == [
        line for line in empty.splitlines() if b"_created" not in line
    ]
    for value, num in ((0.0, 1), (0.002, 3), (0.25, 7), (5.0, 1), (5.5, 2)):
        batched.observe(value, num=num)
        for _ in range(num):
            plain.observe(value)
    assert generate_latest(ours) == b"".join(
        line for line in generate_latest(theirs).splitlines(keepends=True) if b"_created" not in line
    )


def test_a_second_metric_of_its_name_is_refused() -> None:
    registry = CollectorRegistry()
    BatchedHistogram("a:b", "", buckets=BUCKETS, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("a:b", "", registry=registry)
