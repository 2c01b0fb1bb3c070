"""Guesses from texts: what comes next where the same tokens stood before."""

from random import Random

import numpy as np
import pytest

from scheduler.messages import NewSequence, SamplingParams, SequenceId, SequenceInputs, ServiceTerms
from scheduler.sequence import Sequence
from worker.speculation.drafter import (
    Drafter,
    ExpectedText,
    OwnText,
    RecentReplies,
    ScopedReplies,
    find_continuations,
)
from worker.worker_config import DraftMethod, SpeculationConfig


def new_sequence() -> NewSequence:
    return Sequence(SequenceId(1), (1, 2), SamplingParams()).as_new()


def ids(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.int32)


@pytest.mark.parametrize(
    ("text", "tail", "least", "most", "places"),
    [
        ([1, 2, 3, 1, 2, 4], [1, 2], 2, 4, [2, 5]),
        ([1, 2, 3, 9, 2, 4], [1, 2], 1, 4, [2]),
        ([1, 2, 3, 9, 2, 4], [1, 2], 1, 1, [2, 5]),
        ([1, 2, 3], [7, 3], 1, 4, [3]),
        ([1, 2, 3], [7, 3], 2, 4, []),
        ([], [1], 1, 4, []),
        ([1], [], 1, 4, []),
    ],
)
def test_the_longest_match_decides(text, tail, least, most, places) -> None:
    found = find_continuations(ids(*text), ids(*tail), least=least, most=most)
    assert found.tolist() == places


def test_the_own_text_goes_on_as_it_last_did_and_a_loop_goes_on_beyond_its_end() -> None:
    proposer = OwnText(least=2, most=4)
    assert proposer.propose(ids(1, 2, 3, 4, 9, 1, 2), 3, reach=100).tolist() == [3, 4, 9]
    assert proposer.propose(ids(8, 5, 6, 5, 6), 5, reach=100).tolist() == [5, 6, 5, 6, 5]
    assert proposer.propose(ids(1, 2, 3), 3, reach=100).tolist() == []


def test_a_prediction_is_followed_past_tokens_that_differ() -> None:
    expected = ids(*range(10, 40))
    proposer = ExpectedText(expected, num_prompt_tokens=2)
    text = [1, 2]
    assert proposer.propose(ids(*text), 3, reach=100).tolist() == [10, 11, 12]
    text += [10, 11]
    assert proposer.propose(ids(*text), 2, reach=100).tolist() == [12, 13]
    text += [99]  # in place of 12
    assert proposer.propose(ids(*text), 2, reach=100).tolist() == [13, 14]
    text += [25, 26]  # something was left out
    assert proposer.propose(ids(*text), 2, reach=100).tolist() == [27, 28]
    text += [38, 39]
    assert proposer.propose(ids(*text), 2, reach=100).tolist() == []


def test_a_prediction_is_looked_up_about_its_place_and_no_farther_than_half_the_reach() -> None:
    expected = ids(*range(10, 60))
    text = [1, 10, 11, 12, 13, 99, 30, 31]
    for reach, place in ((48, 32), (20, 17)):
        proposer = ExpectedText(expected, num_prompt_tokens=1)
        assert proposer.propose(ids(*text), 1, reach=reach).tolist() == [place]


def test_replies_are_found_again_until_the_ring_has_overwritten_them() -> None:
    replies = RecentReplies(capacity_tokens=16, least=2, most=4)
    replies.add(ids(1, 2, 3, 4))
    replies.add(ids(5, 6, 7))
    assert replies.propose(ids(0, 1, 2), 8, reach=100).tolist() == [3, 4], "not into the next reply"
    replies.add(ids(*range(20, 30)))
    assert replies.propose(ids(0, 1, 2), 8, reach=100).tolist() == []
    assert replies.propose(ids(20, 21), 2, reach=100).tolist() == [22, 23]
    replies.add(ids(*range(40, 80)))
    assert replies.propose(ids(77, 78), 2, reach=100).tolist() == [79]


@pytest.mark.parametrize("reach", [20, 100])
def test_of_several_replies_the_newest_is_followed_wherever_the_ring_has_it(reach: int) -> None:
    replies = RecentReplies(capacity_tokens=20, least=2, most=4)
    for number in range(1, 30):
        replies.add(ids(1, 2, number, number))
        assert replies.propose(ids(1, 2), 1, reach=reach).tolist() == [number]


def test_a_search_reaches_as_far_back_as_it_may_and_no_farther() -> None:
    text = ids(1, 2, 3, *range(10, 20), 1, 2)
    proposer = OwnText(least=2, most=4)
    assert proposer.propose(text, 1, reach=len(text)).tolist() == [3]
    assert proposer.propose(text, 1, reach=len(text) - 1).tolist() == []
    replies = RecentReplies(capacity_tokens=32, least=2, most=4)
    replies.add(ids(1, 2, 3, 4))
    replies.add(ids(5, 6, 7))
    assert replies.propose(text, 1, reach=9).tolist() == [3]
    assert replies.propose(text, 1, reach=7).tolist() == []
    assert replies.propose(ids(5, 6), 1, reach=7).tolist() == [7]


def test_replies_within_reach_are_found_across_the_end_of_the_ring() -> None:
    replies = RecentReplies(capacity_tokens=1 << 16, least=2, most=4)
    for number in range(66):
        replies.add(np.arange(number * 1000, number * 1000 + 1000, dtype=np.int32))
    reach = (1 << 19) // 9
    assert replies.propose(ids(65_100, 65_101), 2, reach=reach).tolist() == [65_102, 65_103]
    assert replies.propose(ids(64_100, 64_101), 2, reach=reach).tolist() == [64_102, 64_103]
    assert replies.propose(ids(1_100, 1_101), 2, reach=reach).tolist() == []


@pytest.mark.parametrize(("method", "num_rows"), [(DraftMethod.NGRAM, 8), (DraftMethod.SUFFIX, 4)])
def test_rows_of_a_step_and_sources_of_a_row_share_what_may_be_searched(
    method: DraftMethod, num_rows: int
) -> None:
    """Sources of a row are two where drafts come by suffixes."""
    drafter = Drafter(SpeculationConfig(method=method, num_speculative_tokens=1))
    drafter.add(0, new_sequence())
    text = np.concatenate((ids(1, 2, 3), np.arange(10, 40_010), ids(1, 2))).astype(np.int32)
    assert drafter.propose(0, text, num_rows=num_rows) == (3,)
    assert drafter.propose(0, text, num_rows=2 * num_rows) == ()


def test_a_drafter_without_a_method_is_idle_until_a_prediction_comes() -> None:
    drafter = Drafter(SpeculationConfig())
    drafter.add(0, new_sequence())
    assert drafter.is_idle
    drafter = Drafter(SpeculationConfig(method=DraftMethod.NGRAM, num_speculative_tokens=2))
    drafter.add(0, new_sequence())
    assert drafter.propose(0, ids(1, 2, 3, 1, 2), num_rows=1) == (3, 1)
    drafter.remove(0, ids(1, 2, 3, 1, 2))
    assert drafter.is_idle
    assert drafter.propose(0, ids(1, 2, 3, 1, 2), num_rows=1) == ()


def drafts_after_a_reply(tenant: str, cache_salt: str, adapter: str) -> tuple[int, ...]:
    """Drafts of a sequence on these terms, after one of tenant a, salt s and adapter x got a reply."""
    drafter = Drafter(SpeculationConfig(method=DraftMethod.SUFFIX, num_speculative_tokens=2))
    for row, (terms, name) in enumerate(
        [
            (ServiceTerms(tenant="a", cache_salt="s"), "x"),
            (ServiceTerms(tenant=tenant, cache_salt=cache_salt), adapter),
        ]
    ):
        inputs = SequenceInputs(adapter=name)
        seq = Sequence(SequenceId(row), (1, 2), SamplingParams(), terms, inputs=inputs)
        drafter.add(row, seq.as_new())
    drafter.remove(0, ids(1, 2, 70, 71, 72, 73, 74))
    return drafter.propose(1, ids(1, 2, 70, 71), num_rows=1)


@pytest.mark.parametrize(
    ("tenant", "cache_salt", "adapter", "drafts"),
    [
        ("a", "s", "x", (72, 73)),
        ("b", "s", "x", ()),
        ("a", "t", "x", ()),
        ("a", "s", "y", ()),
        ("", "s", "x", ()),
        ("as", "", "x", ()),
    ],
)
def test_a_reply_is_a_source_for_the_same_tenant_salt_and_adapter_only(
    tenant: str, cache_salt: str, adapter: str, drafts: tuple[int, ...]
) -> None:
    assert drafts_after_a_reply(tenant, cache_salt, adapter) == drafts


def test_scopes_are_bounded_and_the_one_whose_last_reply_is_the_oldest_is_forgotten() -> None:
    replies = ScopedReplies(max_scopes=2, capacity_tokens=16, least=2, most=4)
    one, two, three = (("", salt, "") for salt in "123")
    source = replies.of(one)
    assert source.propose(ids(1, 2), 4, reach=100).tolist() == []
    replies.add(one, ids(1, 2, 3))
    replies.add(two, ids(1, 2, 4))
    replies.add(one, ids(5, 6, 7))
    replies.add(three, ids(1, 2, 8))
    assert source.propose(ids(1, 2), 4, reach=100).tolist() == [3]
    assert replies.of(two).propose(ids(1, 2), 4, reach=100).tolist() == []
    assert replies.of(three).propose(ids(1, 2), 4, reach=100).tolist() == [8]


@pytest.mark.parametrize("num_rows", [2, 5])
def test_rows_without_hope_are_those_that_a_search_of_each_leaves_without_a_guess(num_rows: int) -> None:
    random, drafter = Random(num_rows), Drafter(SpeculationConfig(method=DraftMethod.NGRAM))
    token_ids_CL = np.full((num_rows, 24), 2, np.int32)
    num_hopeless = 0
    for _ in range(200):
        ends_C = np.array([random.randint(1, 24) for _ in range(num_rows)])
        for row, end in enumerate(ends_C):  # what was there before lies behind the end
            token_ids_CL[row, :end] = [random.randrange(8) for _ in range(end)]
            drafter.add(row, new_sequence())
        hopeless = drafter.hopeless([*range(num_rows)], token_ids_CL, ends_C)
        guesses = [
            drafter.propose(row, token_ids_CL[row, :end], num_rows=num_rows) for row, end in enumerate(ends_C)
        ]
        assert not any(guesses[row] for row in hopeless)
        num_hopeless += len(hopeless)
        assert not drafter.hopeless([0], token_ids_CL, ends_C), "one alone is searched"
    assert num_hopeless > 20 * num_rows
