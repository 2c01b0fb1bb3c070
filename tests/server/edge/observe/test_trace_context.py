"""The header traceparent: read strictly, and ignored where it is not as the standard says."""

import pytest

from server.edge.observe.spans import TraceContext, trace_context_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def read(*values: str) -> TraceContext | None:
    return trace_context_of([(b"traceparent", value.encode()) for value in values])


@pytest.mark.parametrize(
    ("value", "is_sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-03", True),  # flags that this version does not know
        (f"  00-{TRACE}-{PARENT}-01\t", True),
        (f"01-{TRACE}-{PARENT}-01", True),  # a later version
        (f"01-{TRACE}-{PARENT}-01-what-it-adds", True),
    ],
)
def test_a_right_one_is_taken(value, is_sampled) -> None:
    assert read(value) == TraceContext(trace_id=TRACE, parent_id=PARENT, is_sampled=is_sampled)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-01-more",  # version 00 has no more
        f"00-{TRACE}-{PARENT}-01-",
        f"01-{TRACE}-{PARENT}-01.more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE[:-1]}g-{PARENT}-01",
        f"00_{TRACE}_{PARENT}_01",
        f"00-{TRACE}-{PARENT}-01\n",
    ],
)
def test_a_wrong_one_is_as_good_as_none(value) -> None:
    assert read(value) is None


def test_none_and_two_are_none() -> None:
    right = f"00-{TRACE}-{PARENT}-01"
    assert read() is None
    assert read(right, right) is None
