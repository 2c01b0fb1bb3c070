"""The bytes of a stream, to the letter, and what interrupts it."""

import asyncio
import re
import time

import httpx
import orjson
import pytest

from engine.errors import EngineDied, EngineUnavailable, Overloaded, RequestFailed, RequestRejected
from engine.types import FinishReason
from server.api.chat.models import ChatCompletionChunk
from server.api.completions.completions import Completion
from server.edge.http.endpoint import ErrorReplyBody
from tests.server.conftest import connect, impatient

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
PROMPT = {"prompt": "hi", "max_tokens": 2, "stream": True}


def events(response: httpx.Response) -> list[dict]:
    """The payloads, after checking the frame around them."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    blocks = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [orjson.loads(block.removeprefix("data: ")) for block in blocks]


async def stream(client, path, body):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return events(response)


async def test_a_chat_stream_is_framed_as_openai_frames_it(client):
    response = await client.post(CHAT, json={**HI, "stream_options": {"include_usage": True}})
    text = re.sub(r"chatcmpl-[0-9a-f]{32}", "ID", response.text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    text = re.sub(r"fp_[0-9a-f]{12}", "FP", text)
    head = 'data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"fake",'
    head += '"system_fingerprint":"FP",'
    role, first, second, end, usage, done, rest = text.split("\n\n")
    assert role == head + (
        '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        '"usage":null}'
    )
    assert first == head + (
        '"choices":[{"index":0,"delta":{"content":"H"},"logprobs":null,"finish_reason":null}],"usage":null}'
    )
    assert '"delta":{"content":"I"}' in second
    assert end == head + (
        '"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null}],'
        '"usage":null}'
    )
    assert usage == head + (
        '"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,'
        '"prompt_tokens_details":{"cached_tokens":4}}}'
    )
    assert done == "data: [DONE]"
    assert rest == ""


@pytest.mark.parametrize("end_as", [FinishReason.LENGTH, FinishReason.EXPIRED])
@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (COMPLETIONS, PROMPT)])
async def test_each_choice_ends_once_and_all_chunks_share_one_head(client, engine, path, body, end_as):
    engine.end_as = end_as
    chunks = await stream(client, path, {**body, "n": 3})
    model = ChatCompletionChunk if path == CHAT else Completion
    for chunk in chunks:
        model.model_validate(chunk, strict=True)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_completion_stream_ends_with_text_and_reason_in_one_chunk(client):
    chunks = await stream(client, COMPLETIONS, PROMPT)
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ("H", None),
        ("I", "length"),
    ]


async def test_an_end_without_text_is_still_told(client, engine):
    engine.texts = ("a", "")
    chunks = await stream(client, COMPLETIONS, PROMPT)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]


async def test_usage_in_every_chunk_counts_up(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, COMPLETIONS, {**PROMPT, "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]
    assert chunks[-1]["choices"] == []


async def test_who_refuses_usage_gets_none_in_any_chunk(client):
    options = {"include_usage": False, "continuous_usage_stats": True}
    chunks = await stream(client, COMPLETIONS, {**PROMPT, "stream_options": options})
    assert not any(chunk.get("usage") for chunk in chunks)


async def test_tokens_whose_text_is_held_back_make_no_chunk(client, engine):
    engine.texts = ("", "ab")
    assert len(await stream(client, COMPLETIONS, PROMPT)) == 1
    options = {"continuous_usage_stats": True}
    assert len(await stream(client, COMPLETIONS, {**PROMPT, "stream_options": options})) == 2
    assert len(await stream(client, COMPLETIONS, {**PROMPT, "logprobs": 0})) == 2


async def test_the_pieces_joined_are_the_whole_reply(client, engine):
    engine.texts = ("für", " ", "\n\n", 'data: "x"', "", "\u2028😀")
    body = {**HI, "max_tokens": 6, "logprobs": True}
    whole = (await client.post(CHAT, json={**body, "stream": False})).json()["choices"][0]
    choices = [chunk["choices"][0] for chunk in await stream(client, CHAT, body)]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
    pieces = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert pieces == whole["logprobs"]["content"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (COMPLETIONS, PROMPT)])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestRejected("no", param="prompt"), 400, "invalid_value"),
        (Overloaded("busy", retry_after_s=0.3), 429, "server_overloaded"),
        (EngineUnavailable("bye", code="shutting_down"), 503, "shutting_down"),
    ],
)
async def test_a_refusal_at_admission_keeps_its_status_although_a_stream_was_asked_for(
    client, engine, path, body, error, status, code
):
    engine.admission_error = error
    response = await client.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestFailed("logits are not finite"), "model_error"),
        (EngineDied("gone"), "engine_restarted"),
        (KeyError("/secret"), "internal_error"),
    ],
)
async def test_a_failure_under_way_is_an_error_event_and_then_done(client, engine, error, code):
    engine.error_after, engine.error = 1, error
    response = await client.post(CHAT, json=HI)
    assert response.status_code == 200
    *_, last = events(response)
    body = ErrorReplyBody.model_validate(last).error
    assert (body.type, body.code) == ("server_error", code)
    assert response.headers["x-request-id"] in body.message
    assert "secret" not in response.text
    assert "finite" not in response.text


async def test_without_memory_a_stream_ends_in_one_event_that_says_so(client, engine):
    engine.error_after, engine.error = 1, MemoryError()
    response = await client.post(CHAT, json=HI)
    *_, last = events(response)
    assert ErrorReplyBody.model_validate(last).error.code == "low_memory"
    assert response.text.endswith("data: [DONE]\n\n")


async def test_a_stream_without_an_end_is_not_mistaken_for_a_whole_one(client, engine):
    engine.is_without_end = True
    assert (await stream(client, CHAT, HI))[-1]["error"]["code"] == "internal_error"


async def test_silence_is_broken_by_comments(engine):
    engine.pause_s = 0.05
    async with connect(impatient(engine, keep_alive_s=0.01)) as client:
        response = await client.post(CHAT, json=HI)
    assert response.text.startswith(": keep-alive\n\n")
    assert 3 <= response.text.count(": keep-alive\n\n") <= 12
    assert len(events(response)) == 4


async def test_a_busy_stream_needs_no_comments(engine):
    engine.pause_s = 0.004
    async with connect(impatient(engine, keep_alive_s=0.1)) as client:
        response = await client.post(CHAT, json={**HI, "max_tokens": 20})
    assert ": keep-alive" not in response.text


async def test_a_refusal_after_the_first_comment_is_an_error_event(engine):
    app = impatient(engine, keep_alive_s=0.01)
    engine.pause_s, engine.error_after, engine.error = 0.05, 1, Overloaded("busy", retry_after_s=1)
    async with connect(app) as client:
        response = await client.post(COMPLETIONS, json=PROMPT)
    assert response.status_code == 200
    assert events(response)[-1]["error"]["code"] == "server_overloaded"


async def test_a_refusal_keeps_its_status_although_a_comment_is_due_at_that_moment(engine, monkeypatch):
    async def busy(request):
        time.sleep(0.03)  # the loop stands still, so that the refusal and the comment are due in one turn
        raise Overloaded("busy", retry_after_s=1)
        yield

    monkeypatch.setattr(engine, "generate", busy)
    async with connect(impatient(engine, keep_alive_s=0.01)) as client:
        response = await client.post(COMPLETIONS, json=PROMPT)
    assert response.status_code == 429


async def test_a_client_that_stops_reading_loses_its_request(engine):
    app = impatient(engine, send_timeout_s=0.03)
    body = orjson.dumps({**PROMPT, "max_tokens": 100})
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return inbox.pop() if inbox else await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "raw_path": COMPLETIONS.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "server": ("test", 80),
        "client": ("test", 1),
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }
    async with asyncio.timeout(30):
        await app(scope, receive, send)
    assert engine.num_running == 0
    assert len(engine.aborted) == 1
    assert engine.metrics.registry.get_sample_value("tokenyard:slow_client_aborts_total") == 1


async def test_comments_can_be_left_out(engine):
    engine.pause_s = 0.02
    async with connect(impatient(engine, keep_alive_s=0.0)) as client:
        response = await client.post(CHAT, json=HI)
    assert ": keep-alive" not in response.text
    assert len(events(response)) == 4
