"""Outputs of the engine process become text for one reader."""

import asyncio

import pytest

from engine.errors import EngineDied, RequestFailed, RequestRejected
from engine.live_request import LiveRequest
from engine.tokenizer import SpecialTokens
from engine.types import GenerationRequest
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


def live_request(*, n: int = 1, **changes: object) -> LiveRequest:
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1, 2), params=SamplingParams(), n=n, **changes
    )
    return LiveRequest(request, tuple(SequenceId(i) for i in range(n)), TOKENIZER)


def feed(live: LiveRequest, text: str, *, index: int = 0, end: FinishReason | None = None) -> None:
    ids = TOKENIZER.encode_rendered_chat(text)
    for place, token_id in enumerate(ids):
        reason = end if place == len(ids) - 1 else None
        live.push(SequenceOutput(SequenceId(index), (token_id,), reason), EOS)


async def test_a_slow_reader_gets_several_steps_as_one_output() -> None:
    live = live_request()
    feed(live, "hello world")
    (output,) = await live.next_outputs()
    assert output.text == "hello world"
    assert output.finish_reason is None


async def test_the_end_is_told_once_and_then_there_is_nothing() -> None:
    live = live_request()
    feed(live, "hello", end=FinishReason.LENGTH)
    (output,) = await live.next_outputs()
    assert output.finish_reason is FinishReason.LENGTH
    assert await live.next_outputs() == []


async def test_choices_are_told_apart_and_the_request_is_over_with_the_last() -> None:
    live = live_request(n=2)
    feed(live, "one", index=0, end=FinishReason.STOP)
    feed(live, "two", index=1)
    assert [(o.index, o.text) for o in await live.next_outputs()] == [(0, "one"), (1, "two")]
    assert not live.is_over
    assert live.unfinished_ids == (1,)


async def test_a_stop_string_ends_the_choice_and_later_tokens_do_not_count() -> None:
    live = live_request(stop=("lo w",))
    feed(live, "hello world and more")
    (output,) = await live.next_outputs()
    assert output.text == "hel"
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == "lo w"
    assert TOKENIZER.decode(output.token_ids, special=SpecialTokens.KEEP).startswith("hello w")
    assert live.is_over


async def test_the_stop_token_is_named_but_not_the_end_of_sequence_token() -> None:
    for token_id, named in ((5, 5), (0, None)):
        live = live_request()
        live.push(SequenceOutput(SequenceId(0), (token_id,), FinishReason.STOP), EOS)
        (output,) = await live.next_outputs()
        assert output.stop_reason == named


async def test_cached_tokens_are_in_every_output() -> None:
    live = live_request()
    start = SequenceStart(queue_s=0.0, num_cached_tokens=32)
    live.push(SequenceOutput(SequenceId(0), (5,), None, (), start), EOS)
    feed(live, "x", end=FinishReason.LENGTH)
    assert [o.num_cached_tokens for o in await live.next_outputs()] == [32]


async def test_logprobs_come_with_the_text_and_the_bytes_of_each_token() -> None:
    live = live_request()
    (token_id,) = TOKENIZER.encode_rendered_chat("a")
    logprobs = TokenLogprobs(token_id, -0.5, 1, ((token_id, -0.5), (9, -2.0)))
    live.push(SequenceOutput(SequenceId(0), (token_id,), None, (logprobs,)), EOS)
    (output,) = await live.next_outputs()
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
        await live.next_outputs()


async def test_a_reader_that_waits_is_woken_by_the_death_of_the_engine() -> None:
    live = live_request()
    waiting = asyncio.create_task(live.next_outputs())
    await asyncio.sleep(0)
    live.fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        await waiting
