"""What vLLM's clients, balancers and platforms send and expect, beyond OpenAI's API."""

import dataclasses

import pytest

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
