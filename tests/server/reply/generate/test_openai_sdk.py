"""The real OpenAI SDK against the real server."""

from collections.abc import AsyncIterator

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from engine.errors import EngineUnavailable, Overloaded, RequestFailed
from engine.types import FinishReason, TokenOutput
from server.api.chat.replies import ChatStream
from server.app import build_app
from server.reply.generate.replies import ReplyHead, ReplyPlan
from tests.server.conftest import Settings, serving

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def sdk(url) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_a_chat_completion(sdk):
    reply = await sdk.chat.completions.create(
        model="fake", messages=HI, max_tokens=2, logprobs=True, top_logprobs=2
    )
    choice = reply.choices[0]
    assert choice.message.content == "HI"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert [token.token for token in choice.logprobs.content] == ["H", "I"]
    assert [top.token for top in choice.logprobs.content[0].top_logprobs] == ["A", "B"]
    assert reply.usage.total_tokens == 4
    assert reply.usage.prompt_tokens_details.cached_tokens == 4


async def test_a_streamed_chat_completion(sdk):
    stream = await sdk.chat.completions.create(
        model="fake", messages=HI, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "HIH"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 3


async def test_the_sdks_own_accumulator_understands_the_stream(sdk, engine):
    engine.end_as = FinishReason.STOP  # it raises on "length"
    async with sdk.chat.completions.stream(model="fake", messages=HI, max_tokens=3, logprobs=True) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "HIH"
    assert len(final.choices[0].logprobs.content) == 3


def test_choices_begin_in_their_order_by_which_the_accumulator_places_them() -> None:
    head = ReplyHead(id="a", created_s=1, model="fake", system_fingerprint="fp")
    stream = ChatStream(ReplyPlan(head=head, num_prompt_tokens=(1,), n=3))
    state = ChatCompletionStreamState()
    for number, text in ((2, "c"), (0, "a"), (1, "b"), (2, "d")):
        for chunk in stream.update(0, TokenOutput(index=number, text=text, token_ids=(1,))):
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    choices = state.current_completion_snapshot.choices
    assert [choice.message.content for choice in choices] == ["a", "b", "cd"]


async def test_a_completion(sdk):
    reply = await sdk.completions.create(model="fake", prompt=["ab", "cd"], max_tokens=2, logprobs=1)
    assert [choice.text for choice in reply.choices] == ["AB", "CD"]
    assert reply.choices[1].logprobs.text_offset == [0, 1]


async def test_a_scored_prompt_and_the_best_of_several(sdk, engine):
    engine.choice_logprobs = (-3.0, -0.1)
    scored = await sdk.completions.create(model="fake", prompt="ab", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == "ab"
    assert scored.choices[0].logprobs.token_logprobs == [None, -2.0]
    best = await sdk.completions.create(model="fake", prompt="ab", max_tokens=2, best_of=2, logprobs=0)
    assert best.choices[0].logprobs.token_logprobs == [-0.1, -0.1]
    assert best.usage.completion_tokens == 4


async def test_a_streamed_completion(sdk):
    stream = await sdk.completions.create(model="fake", prompt="ab", max_tokens=2, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "AB"


async def test_models_are_listed_and_retrieved(sdk):
    assert [model.id async for model in sdk.models.list()] == ["fake", "org/fake-alias"]
    assert (await sdk.models.retrieve("org/fake-alias")).created == 1_700_000_000
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_a_bad_request_is_a_bad_request_error(sdk):
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(model="fake", messages=HI, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_value"
    assert caught.value.request_id.startswith("req_")


async def test_an_unknown_model_is_a_not_found_error(sdk):
    with pytest.raises(openai.NotFoundError):
        await sdk.completions.create(model="gpt-4", prompt="x")


async def test_overload_is_a_rate_limit_error_and_is_tried_again(sdk, engine):
    engine.admission_error = Overloaded("busy", retry_after_s=0.02)
    with pytest.raises(openai.RateLimitError) as caught:
        await sdk.with_options(max_retries=2).chat.completions.create(model="fake", messages=HI)
    assert caught.value.response.headers["retry-after-ms"] == "20"
    assert len(engine.requests) == 3


async def test_a_failure_that_would_come_again_is_not_tried_again(sdk, engine):
    engine.admission_error = RequestFailed("nan")
    with pytest.raises(openai.InternalServerError) as caught:
        await sdk.with_options(max_retries=2).chat.completions.create(model="fake", messages=HI)
    assert caught.value.code == "model_error"
    assert len(engine.requests) == 1


async def test_a_draining_server_is_an_internal_server_error(sdk, engine):
    engine.admission_error = EngineUnavailable("bye", code="shutting_down")
    with pytest.raises(openai.InternalServerError) as caught:
        await sdk.chat.completions.create(model="fake", messages=HI)
    assert caught.value.status_code == 503


async def test_a_failure_in_the_middle_of_a_stream_is_raised(sdk, engine):
    engine.error_after, engine.error = 2, RequestFailed("nan")
    stream = await sdk.chat.completions.create(model="fake", messages=HI, max_tokens=5, stream=True)
    with pytest.raises(openai.APIError, match="the model failed on this request"):
        async for _ in stream:
            pass


async def test_a_wrong_key_is_an_authentication_error(engine):
    async with serving(build_app(engine, Settings(api_keys=("right",)))) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as wrong:
            with pytest.raises(openai.AuthenticationError) as caught:
                await wrong.models.list()
            assert caught.value.code == "invalid_api_key"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="right", max_retries=0) as right:
            assert (await right.models.list()).data[0].id == "fake"
