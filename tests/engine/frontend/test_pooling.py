"""Prompts that become vectors, in the API process: how texts are cut, and how a request ends."""

import asyncio
from pathlib import Path

import pytest

from engine.errors import DeadlineExceeded, EngineError, RequestFailed, RequestRejected
from engine.frontend.active_request import ActivePooling
from engine.text.tokenizer import Tokenizer
from engine.types import PoolingParams, PoolingRequest, PoolingTask, TextCut
from scheduler.messages import FinishReason, SequenceId, SequenceOutput, SequenceStart
from tests.pooling_checkpoints import write_pair_tokenizer

SEQUENCE = SequenceId(5)
WHOLE = TextCut(param="input")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_pair_tokenizer(folder)
    return Tokenizer.load(folder)


def cut(max_tokens: int) -> TextCut:
    return TextCut(param="input", max_tokens=max_tokens)


def test_a_cut_that_does_not_bite_changes_nothing(tokenizer: Tokenizer) -> None:
    for text in ("hello world", "", "é"):
        assert tokenizer.encode_text(text, cut(100)) == tokenizer.encode_text(text, WHOLE)
        pair = tokenizer.encode_text(text, WHOLE, second="in time")
        assert tokenizer.encode_text(text, cut(100), second="in time") == pair


def test_a_text_loses_its_end_and_keeps_its_special_tokens(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode_text("a b c d e f g", WHOLE).token_ids
    assert tokenizer.encode_text("a b c d e f g", cut(5)).token_ids == (*whole[:4], whole[-1])


@pytest.mark.parametrize(
    ("num_first", "num_second", "expected"), [(9, 2, (5, 2)), (2, 9, (2, 5)), (9, 9, (4, 3)), (3, 4, (3, 4))]
)
def test_of_a_pair_the_longer_text_is_cut_first(
    tokenizer: Tokenizer, num_first: int, num_second: int, expected: tuple[int, int]
) -> None:
    first, second = "x" * num_first, "z" * num_second
    token_ids, start = tokenizer.encode_text(first, cut(10), second=second)
    assert start is not None
    assert (start - 2, len(token_ids) - start - 1) == expected


def test_a_cut_must_leave_more_than_special_tokens(tokenizer: Tokenizer) -> None:
    for second, too_few in ((None, 2), ("b", 4)):
        with pytest.raises(RequestRejected, match="special") as caught:
            tokenizer.encode_text("a", cut(too_few), second=second)
        assert caught.value.param == "truncate_prompt_tokens"


def test_a_text_that_is_no_unicode_is_refused_by_its_field(tokenizer: Tokenizer) -> None:
    for arguments in ({"text": "\ud800"}, {"text": "a", "second": "\ud800"}):
        with pytest.raises(RequestRejected) as caught:
            tokenizer.encode_text(cut=TextCut(param="documents"), **arguments)
        assert caught.value.param == "documents"


@pytest.fixture
def live() -> ActivePooling:
    request = PoolingRequest(
        request_id="r", prompt_token_ids=(1, 2), params=PoolingParams(task=PoolingTask.EMBED)
    )
    return ActivePooling(request, SEQUENCE, asyncio.Event())


def test_it_is_over_when_its_vector_is_there(live: ActivePooling) -> None:
    start = SequenceStart(queue_s=0.0, num_cached_tokens=1)
    assert not live.is_over
    live.push(
        SequenceOutput(SEQUENCE, (), FinishReason.STOP, start=start, pooled=b"\0\0\0\0"), eos_token_ids=()
    )
    assert live.is_over
    assert live.vector() == b"\0\0\0\0"


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.REJECTED, RequestRejected),
        (FinishReason.FAILED, RequestFailed),
        (FinishReason.EXPIRED, DeadlineExceeded),
    ],
)
def test_whatever_else_ends_it_is_raised(
    live: ActivePooling, reason: FinishReason, error: type[EngineError]
) -> None:
    live.push(SequenceOutput(SEQUENCE, (), reason, message="so it is"), eos_token_ids=())
    assert live.is_over
    with pytest.raises(error, match="so it is"):
        live.vector()
