"""Outputs of the engine process become text for one reader."""

import asyncio

import pytest

from engine.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineUnavailable,
    RequestFailed,
    RequestRejected,
)
from engine.frontend.active_text import ActiveText
from engine.text.tokenizer import SpecialTokens
from engine.types import GenerationRequest
from scheduler.draft_messages import PredictionUse
from scheduler.messages import (
    FinishReason,
    SamplingParams,
    SequenceId,
    SequenceOutput,
    SequenceStart,
    TokenLogprobs,
)
from tests.engine.small_tokenizers import byte_level

TOKENIZER = byte_level()
EOS = (0,)


def live_request(*, n: int = 1, min_tokens: int = 0, **changes: object) -> ActiveText:
    params = SamplingParams(min_tokens=min_tokens)
    request = GenerationRequest(request_id="r", prompt_token_ids=(1, 2), params=params, n=n, **changes)
    return ActiveText(request, tuple(SequenceId(i) for i in range(n)), TOKENIZER, asyncio.Event())


def feed(live: ActiveText, text: str, *, index: int = 0, end: FinishReason | None = None) -> None:
    ids = TOKENIZER.encode_rendered_chat(text)
    for place, token_id in enumerate(ids):
        reason = end if place == len(ids) - 1 else None
        live.push(SequenceOutput(SequenceId(index), (token_id,), reason), EOS)


async def test_a_slow_reader_gets_several_steps_as_one_output() -> None:
    live = live_request()
    feed(live, "hello world")
    (output,) = live.take()
    assert output.text == "hello world"
    assert output.finish_reason is None


async def test_the_end_is_told_once_and_then_there_is_nothing() -> None:
    live = live_request()
    feed(live, "hello", end=FinishReason.LENGTH)
    (output,) = live.take()
    assert output.finish_reason is FinishReason.LENGTH
    assert live.take() == []


async def test_choices_are_told_apart_and_the_request_is_over_with_the_last() -> None:
    live = live_request(n=2)
    feed(live, "one", index=0, end=FinishReason.LENGTH)
    feed(live, "two", index=1)
    assert [(o.index, o.text) for o in live.take()] == [(0, "one"), (1, "two")]
    assert not live.is_over
    assert live.unfinished_ids == (1,)


async def test_a_stop_string_ends_the_choice_and_later_tokens_do_not_count() -> None:
    live = live_request(stop=("lo w",))
    feed(live, "hello world and more")
    (output,) = live.take()
    assert output.text == "hel"
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == "lo w"
    assert TOKENIZER.decode(output.token_ids, special=SpecialTokens.KEEP).startswith("hello w")
    assert live.is_over


async def test_predicted_tokens_behind_a_stop_string_are_none_of_the_reply() -> None:
    live = live_request(stop=("b",))
    ids = tuple(TOKENIZER.encode_rendered_chat("a b c d"))
    num_kept = next(num for num in range(9) if "b" in TOKENIZER.decode(ids[:num], special=SpecialTokens.KEEP))
    assert num_kept < len(ids) - 1
    prediction = PredictionUse(num_accepted=len(ids) - 1, num_rejected=3)
    live.push(SequenceOutput(SequenceId(0), ids, None, prediction=prediction), EOS)
    (output,) = live.take()
    assert len(output.token_ids) == output.num_accepted_prediction == num_kept
    assert output.num_rejected_prediction == len(ids) - 1 - num_kept + 3


async def test_a_stop_string_within_the_least_number_of_tokens_does_not_end_the_choice() -> None:
    num_tokens = len(TOKENIZER.encode_rendered_chat("hello world"))
    live = live_request(stop=("lo w",), min_tokens=num_tokens)
    feed(live, "hello world and more lo world")
    (output,) = live.take()
    assert output.text == "hello world and more "
    assert output.stop_reason == "lo w"


async def test_the_stop_token_is_named_but_not_the_end_of_sequence_token() -> None:
    for token_id, named in ((5, 5), (0, None)):
        live = live_request()
        live.push(SequenceOutput(SequenceId(0), (token_id,), FinishReason.STOP), EOS)
        (output,) = live.take()
        assert output.stop_reason == named


async def test_cached_tokens_are_in_every_output() -> None:
    live = live_request()
    start = SequenceStart(queue_s=0.0, num_cached_tokens=32)
    live.push(SequenceOutput(SequenceId(0), (5,), None, (), start), EOS)
    feed(live, "x", end=FinishReason.LENGTH)
    assert [o.num_cached_tokens for o in live.take()] == [32]


async def test_logprobs_come_with_the_text_and_the_bytes_of_each_token() -> None:
    live = live_request()
    (token_id,) = TOKENIZER.encode_rendered_chat("a")
    logprobs = TokenLogprobs(token_id, -0.5, 1, ((token_id, -0.5), (9, -2.0)))
    live.push(SequenceOutput(SequenceId(0), (token_id,), None, (logprobs,)), EOS)
    (output,) = live.take()
    (entry,) = output.logprobs
    assert (entry.chosen.token, entry.chosen.token_bytes, entry.chosen.logprob) == ("a", b"a", -0.5)
    assert [top.token_id for top in entry.top] == [token_id, 9]


@pytest.mark.parametrize(
    ("reason", "error"),
    [(FinishReason.REJECTED, RequestRejected), (FinishReason.FAILED, RequestFailed)],
)
async def test_a_refusal_and_a_failure_reach_the_reader_as_errors(
    reason: FinishReason, error: type[Exception]
) -> None:
    live = live_request(n=2)
    live.push(SequenceOutput(SequenceId(1), (), reason, message="because"), EOS)
    with pytest.raises(error, match="because"):
        live.take()


async def test_a_stop_token_counts_but_is_no_part_of_the_text_unless_asked_for() -> None:
    *ids, last = TOKENIZER.encode_rendered_chat("hello world")
    for include in (False, True):
        live = live_request(include_stop_str_in_output=include)
        for token_id in ids:
            live.push(SequenceOutput(SequenceId(0), (token_id,)), EOS)
        live.push(SequenceOutput(SequenceId(0), (last,), FinishReason.STOP), EOS)
        (output,) = live.take()
        assert output.text == TOKENIZER.decode(
            [*ids, *([last] if include else [])], special=SpecialTokens.SKIP
        )
        assert output.token_ids == (*ids, last)
        assert output.stop_reason == last


async def test_the_reason_of_an_end_by_error_is_what_the_error_says() -> None:
    for error, reason in (
        (EngineDied("x"), FinishReason.FAILED),
        (DeadlineExceeded("x"), FinishReason.EXPIRED),
        (RequestRejected("x"), FinishReason.REJECTED),
        (EngineUnavailable("x"), FinishReason.ABORTED),
    ):
        live = live_request()
        live.fail(error)
        assert live.reason_of_end is reason
        with pytest.raises(type(error)):
            live.take()


async def test_logprobs_tell_which_tokens_are_not_in_the_text() -> None:
    special = next(token_id for token_id in range(TOKENIZER.vocab_size) if TOKENIZER.is_special(token_id))
    for skip in (True, False):
        live = live_request(skip_special_tokens=skip)
        output = SequenceOutput(SequenceId(0), (special,), None, (TokenLogprobs(special, -0.5, 1, ()),))
        live.push(output, EOS)
        (taken,) = live.take()
        assert taken.logprobs[0].is_hidden is skip


def of_prompt(*token_ids: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token_id, -1.0, 1, ((token_id, -1.0),)) for token_id in token_ids)


def scored_request(n: int = 1) -> ActiveText:
    """Its prompt has four tokens, of which three have log-probabilities."""
    params = SamplingParams(num_prompt_logprobs=1)
    request = GenerationRequest(request_id="r", prompt_token_ids=(1, 2, 3, 4), params=params, n=n)
    return ActiveText(request, tuple(SequenceId(i) for i in range(n)), TOKENIZER, asyncio.Event())


async def test_a_reply_begins_with_all_logprobs_of_its_prompt() -> None:
    live = scored_request()
    live.push(SequenceOutput(SequenceId(0), (), prompt_logprobs=of_prompt(2)), EOS)
    assert live.take() == []
    live.push(SequenceOutput(SequenceId(0), (50,), prompt_logprobs=of_prompt(3, 4)), EOS)
    (output,) = live.take()
    assert [each.chosen.token_id for each in output.prompt_logprobs] == [2, 3, 4]
    assert output.token_ids == (50,)
    live.push(SequenceOutput(SequenceId(0), (51,)), EOS)
    assert live.take()[0].prompt_logprobs == ()


async def test_choices_that_are_faster_wait_for_the_prompts_logprobs_of_the_first() -> None:
    live = scored_request(n=2)
    live.push(SequenceOutput(SequenceId(1), (50,), FinishReason.LENGTH), EOS)
    assert live.take() == []
    live.push(SequenceOutput(SequenceId(0), (51,), prompt_logprobs=of_prompt(2, 3, 4)), EOS)
    outputs = live.take()
    assert [len(output.prompt_logprobs) for output in outputs] == [3, 3]


async def test_a_deadline_before_the_whole_prompt_is_an_error_although_another_choice_has_tokens() -> None:
    live = scored_request(n=2)
    live.push(SequenceOutput(SequenceId(1), (50,), FinishReason.LENGTH), EOS)
    live.push(SequenceOutput(SequenceId(0), (), FinishReason.EXPIRED, message="too late"), EOS)
    with pytest.raises(DeadlineExceeded):
        live.take()
