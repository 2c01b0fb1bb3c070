"""The bound on the queue, and what is told beyond it."""

import pytest

from engine.errors import Overloaded
from engine.frontend.queue_limits import QueueLimits


def admit(limits: QueueLimits, num_sequences: int, num_tokens: int, *, now_s: float) -> None:
    """Take in all sequences of a call, or none. Raises Overloaded."""
    if not limits.has_room(num_sequences, num_tokens):
        raise limits.refusal(num_sequences, now_s=now_s)
    limits.take_in(num_sequences, num_tokens, now_s=now_s)


def test_a_full_queue_refuses_and_a_started_request_makes_room() -> None:
    limits = QueueLimits(max_queued_tokens=1000, max_queued=2)
    admit(limits, 2, 0, now_s=0.0)
    with pytest.raises(Overloaded):
        admit(limits, 1, 0, now_s=0.0)
    limits.start(0, now_s=1.0)
    admit(limits, 1, 0, now_s=1.0)


def test_a_request_is_admitted_whole_or_not_at_all() -> None:
    limits = QueueLimits(max_queued_tokens=1000, max_queued=4)
    admit(limits, 2, 0, now_s=0.0)
    with pytest.raises(Overloaded):
        admit(limits, 3, 0, now_s=0.0)
    assert limits.num_queued == 2


def test_a_request_larger_than_the_queue_is_served_when_nothing_waits() -> None:
    admit(QueueLimits(max_queued_tokens=1000, max_queued=4), 100, 0, now_s=0.0)


def test_one_that_leaves_before_it_started_makes_room() -> None:
    limits = QueueLimits(max_queued_tokens=1000, max_queued=1)
    admit(limits, 1, 0, now_s=0.0)
    limits.leave(1, 0)
    admit(limits, 1, 0, now_s=0.0)


def test_the_client_is_told_to_come_back_when_the_queue_will_have_emptied() -> None:
    limits = QueueLimits(max_queued_tokens=1000, max_queued=200)
    admit(limits, 120, 0, now_s=0.0)
    for i in range(20):
        limits.start(0, now_s=i * 0.1)
    assert limits.retry_after_s(now_s=2.0) == pytest.approx(10.0, rel=0.05)
    assert QueueLimits(max_queued_tokens=1000, max_queued=1).retry_after_s(now_s=0.0) == 1.0


def test_long_prompts_fill_the_queue_too() -> None:
    limits = QueueLimits(max_queued=100, max_queued_tokens=1000)
    admit(limits, 1, 900, now_s=0.0)
    with pytest.raises(Overloaded, match="900 prompt tokens"):
        admit(limits, 1, 101, now_s=0.0)
    limits.start(900, now_s=1.0)
    admit(limits, 1, 999, now_s=1.0)


def test_each_of_several_models_has_a_part_that_no_crowd_of_another_takes() -> None:
    crowded = QueueLimits(max_queued=8, max_queued_tokens=800)
    quiet = crowded.beside()
    admit(crowded, 6, 600, now_s=0.0)  # two of eight places are the other's
    for num_sequences, num_tokens in ((1, 0), (0, 1)):
        with pytest.raises(Overloaded, match="of which each model has a part"):
            admit(crowded, num_sequences, num_tokens, now_s=0.0)
    assert any(each.has_room(1, 1) for each in quiet.all)
    for _ in range(2):
        admit(quiet, 1, 100, now_s=0.0)
    assert not any(each.has_room(1, 1) for each in crowded.all)
    assert crowded.num_queued == quiet.num_queued == 8
    quiet.start(100, now_s=1.0)
    assert (quiet.has_room(1, 100), crowded.has_room(1, 0)) == (True, False)


def test_a_call_larger_than_the_free_part_is_taken_in_only_where_nothing_waits_at_all() -> None:
    limits = QueueLimits(max_queued=8, max_queued_tokens=800)
    models = [limits, *(limits.beside() for _ in range(9))]
    admit(models[0], 500, 700, now_s=0.0)
    for each in models[1:]:
        with pytest.raises(Overloaded):
            admit(each, 500, 0, now_s=0.0)
    assert limits.num_queued == 500
    crowded = QueueLimits(max_queued=8, max_queued_tokens=800)
    quiet = crowded.beside()
    admit(crowded, 6, 600, now_s=0.0)
    for num_tokens in (201, 700):
        with pytest.raises(Overloaded):
            admit(quiet, 1, num_tokens, now_s=0.0)
    admit(quiet, 2, 200, now_s=0.0)
