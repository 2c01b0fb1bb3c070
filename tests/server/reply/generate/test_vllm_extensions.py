"""Requests of vLLM's clients, balancers and platforms beyond OpenAI's API, and the replies they expect."""

import dataclasses
import json

import pytest

from engine.journal import Journal, JournalEvent, JournalStage
from engine.types import FinishReason
from server.api.responses.models import ResponseObject
from server.reply.generate.replies import shown_times
from tests.server.fake_engine import INFO

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def test_prompt_logprobs_are_null_where_nobody_asked_for_them(client):
    chat = (await client.post(CHAT, json=HELLO)).json()
    completion = (await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})).json()
    assert chat["prompt_logprobs"] is None
    assert completion["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize(("side", "kept"), [(None, "efgh"), ("left", "efgh"), ("right", "abcd")])
async def test_a_prompt_is_cut_at_the_side_that_the_request_names(client, engine, side, kept):
    body = {"prompt": "abcdefgh", "truncate_prompt_tokens": 4, "truncation_side": side, "max_tokens": 1}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert bytes(engine.requests[0].prompt_token_ids) == kept.encode()


@pytest.mark.parametrize(("role", "status"), [("ipython", 200), ("observation", 400), ("ipy", 400)])
async def test_a_role_of_its_own_is_one_that_the_template_names(client, engine, role, status):
    template = "{% if message.role == 'ipython' %}"
    engine.model_info = dataclasses.replace(INFO, chat_template=template)
    messages = [*HELLO["messages"], {"role": role, "content": "42"}]
    response = await client.post(CHAT, json={**HELLO, "messages": messages})
    assert response.status_code == status
    if status == 200:
        assert engine.chats[0][0][-1] == {"role": role, "content": "42"}


async def test_the_load_is_the_number_of_requests_under_way(client, engine):
    await client.post(CHAT, json=HELLO)
    assert (await client.get("/load")).json() == {"server_load": len(engine.requests)}


@pytest.mark.parametrize(
    ("form", "header"),
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3"),
        ("json", 'JSON {"named_metrics":{"kv_cache_usage_perc":0.25,"num_requests_waiting":3}}'),
        ("BIN", None),
        (None, None),
    ],
)
async def test_a_balancer_that_asks_finds_the_load_in_a_header(client, form, header):
    headers = {} if form is None else {"endpoint-load-metrics-format": form}
    response = await client.post(CHAT, json=HELLO, headers=headers)
    assert response.headers.get("endpoint-load-metrics") == header


async def test_one_path_answers_as_the_endpoint_that_knows_the_fields(client):
    chat = await client.post("/invocations", json=HELLO)
    completion = await client.post("/invocations", json={"prompt": "hi", "max_tokens": 1})
    neither = await client.post("/invocations", json={"text": "hi"})
    assert chat.json()["object"] == "chat.completion"
    assert completion.json()["object"] == "text_completion"
    assert neither.json()["error"]["code"] == "missing_field"


async def test_a_priority_in_a_header_of_another_gateway_counts_unless_ours_is_there(client, engine):
    for headers in ({"x-priority": "3"}, {"x-priority": "3", "x-tokenyard-priority": "-2"}):
        await client.post(CHAT, json=HELLO, headers=headers)
    assert [request.terms.priority for request in engine.requests] == [3, -2]


async def test_the_tokenizers_configuration_is_told_without_places(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="{{ x }}")
    shown = (await client.get("/tokenizer_info")).json()
    assert shown == {"tokenizer_class": "Fake", "model_max_length": 128, "chat_template": "{{ x }}"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_times_of_a_request_come_with_its_reply_where_they_are_asked_for(client, path, stream):
    asked = HELLO if path == CHAT else {"prompt": "hi", "max_tokens": 2}
    names = {
        "time_to_first_token_ms",
        "generation_time_ms",
        "queue_time_ms",
        "mean_itl_ms",
        "tokens_per_second",
    }
    for fields, is_there in (({}, False), ({"include_metrics": True}, True), ({"n": 2}, False)):
        body = {**asked, **fields, "stream": stream} | ({"include_metrics": True} if "n" in fields else {})
        reply = await client.post(path, json=body)
        if stream:
            *_, last, done = reply.text.strip().split("\n\n")
            assert done == "data: [DONE]"
            shown = json.loads(last.removeprefix("data: "))
        else:
            shown = reply.json()
        assert ("metrics" in shown) == is_there
        assert not is_there or set(shown["metrics"]) == names


def test_times_follow_from_the_journal_of_the_request():
    journal = Journal()
    journal.queue_s, journal.first_token_s, journal.num_output_tokens = 0.25, 0.5, 5
    events = ((JournalStage.FIRST_TOKEN, 10**9), (JournalStage.FINISHED, 3 * 10**9))
    journal.events = [JournalEvent(stage, time_ns) for stage, time_ns in events]
    assert shown_times(journal)["metrics"] == {
        "time_to_first_token_ms": 500.0,
        "generation_time_ms": 2000.0,
        "queue_time_ms": 250.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 2.0,
    }
    assert shown_times(None) == {}
    assert shown_times(Journal())["metrics"]["mean_itl_ms"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_its_messages_as_the_model_has_them(client, engine, stream):
    body = {"input": "hi", "max_output_tokens": 2, "enable_response_messages": True, "stream": stream}
    reply = await client.post("/v1/responses", json=body)
    response = json.loads(reply.text.strip().split("data: ")[-1])["response"] if stream else reply.json()
    ResponseObject.model_validate(response, strict=True)
    assert response["input_messages"] == [
        {"type": "raw_message_tokens", "message": "hi", "tokens": list(b"hi")}
    ]
    (output,) = response["output_messages"]
    assert output["tokens"] == [0, 1]
    assert output["message"] == "\0\1"
    plain = (await client.post("/v1/responses", json={"input": "hi"})).json()
    assert "input_messages" not in plain


async def test_reasoning_tokens_are_counted_while_a_reply_is_streamed(client, engine):
    engine.model_info = dataclasses.replace(
        INFO, chat_template="<think></think>", added_tokens={"<think>": 1, "</think>": 2}
    )
    engine.texts, engine.end_as = ("<think>", "a", "b", "</think>", "c"), FinishReason.STOP
    body = {**HELLO, "max_tokens": 5, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = (await client.post(CHAT, json=body)).text.strip().split("\n\n")[:-1]
    counts = [
        json.loads(chunk.removeprefix("data: "))["usage"]["completion_tokens_details"]["reasoning_tokens"]
        for chunk in chunks
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    reply = await client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 5, "stream": True})
    response = json.loads(reply.text.strip().split("data: ")[-1])["response"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == counts[-1]


async def test_the_first_chunk_has_the_role_an_empty_text_and_no_tokens_yet(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="<think></think>")
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await client.post(
        CHAT, json={**HELLO, "max_tokens": 2, "stream": True, "stream_options": options}
    )
    first = json.loads(reply.text.split("\n\n")[0].removeprefix("data: "))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]) == (2, 0)


@pytest.mark.parametrize(
    ("template", "status"),
    [
        ("{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% endfor %}", 200),
        ("{% for message in messages %}{{- message.role }}{% endfor %}", 200),
        ("{% if message.role == 'narrator-2' %}", 200),
        ("{% if message.role == 'user' %}{{ message.content }}{% endif %}", 400),
    ],
)
async def test_a_role_beyond_openais_is_taken_where_the_template_writes_it(client, engine, template, status):
    engine.model_info = dataclasses.replace(INFO, chat_template=template)
    body = {"messages": [{"role": "narrator-2", "content": "hi"}], "max_tokens": 1}
    assert (await client.post(CHAT, json=body)).status_code == status
