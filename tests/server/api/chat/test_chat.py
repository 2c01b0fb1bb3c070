"""POST /v1/chat/completions, through the whole application."""

import dataclasses
import time

import orjson
import pytest

from engine.types import FinishReason
from server.api.chat.models import ChatCompletion
from server.api.chat.protocol import MAX_MESSAGES, ChatMessage
from server.api.chat.template_input import template_messages
from tests.server.fake_engine import INFO

HI = [{"role": "user", "content": "hi"}]


async def chat(client, **body):
    response = await client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 2, **body})
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    return response.json()


async def test_a_message_is_answered(client):
    reply = await chat(client)
    assert reply["object"] == "chat.completion"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "HI", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]


async def test_logprobs_come_as_objects_with_bytes(client, engine):
    engine.texts = ("é",)
    reply = await chat(client, logprobs=True, top_logprobs=1, max_tokens=1)
    assert reply["choices"][0]["logprobs"]["content"] == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": [{"token": "A", "logprob": -1.0, "bytes": [65]}],
        }
    ]


async def test_no_alternatives_are_no_reason_to_refuse(client, engine):
    for logprobs in ({}, {"logprobs": False}):
        assert (await chat(client, top_logprobs=0, **logprobs))["choices"][0]["logprobs"] is None
    assert engine.requests[-1].params.num_logprobs is None


async def test_an_expired_reply_is_one_that_the_document_describes(client, engine):
    engine.end_as = FinishReason.EXPIRED
    assert (await chat(client))["choices"][0]["finish_reason"] == "timeout"


async def test_messages_reach_the_template_in_its_own_words(client, engine):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts[:1]},
        {"role": "user", "name": "ada", "content": parts},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "input_text", "text": "d"}]},
    ]
    await chat(client, messages=messages)
    assert engine.chats[0][0] == [
        {"role": "system", "content": "a"},
        {"role": "user", "name": "ada", "content": parts},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "d"},
    ]


async def test_the_end_of_the_template_is_the_callers_choice(client, engine):
    await chat(client)
    await chat(client, continue_final_message=True)
    await chat(client, add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False})
    assert [sent.final for _, sent in engine.chats] == ["answer", "continue", "nothing"]
    assert engine.chats[2][1].kwargs == {"enable_thinking": False}


async def test_without_a_limit_the_reply_may_fill_the_context(client, engine):
    await chat(client, max_tokens=None)
    await chat(client, max_tokens=None, max_completion_tokens=7)
    await chat(client, max_tokens=8, max_completion_tokens=8)
    assert [request.params.max_tokens for request in engine.requests] == [126, 7, 8]


async def test_harmless_values_of_unsupported_fields_are_accepted(client):
    await chat(
        client,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        parallel_tool_calls=True,
        store=False,
        audio=None,
    )


async def test_a_turn_whose_tool_has_no_result_and_whose_arguments_are_an_object_is_read(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="<tool_call>")
    call = {"id": "1", "function": {"name": "srv.look", "arguments": {"at": "é"}}}
    turn = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ]
    await chat(client, messages=[{"role": "user", "content": "hi"}, *turn])
    called, result = engine.chats[0][0][1:3]
    assert called["tool_calls"][0]["function"]["arguments"] == '{"at":"é"}'
    assert (result["name"], result["content"]) == ("srv.look", "")


@pytest.mark.parametrize(
    ("asks", "is_harmless"),
    [
        ({"mirostat": 2}, {"mirostat": 0}),
        ({"typical_p": 0.9}, {"typical_p": 1.0}),
        ({"repeat_penalty": 1.1}, {"repeat_penalty": 1}),
        ({"regex": "a"}, {"regex": None}),
        ({"extra_body": {"top_k": 1}}, {"extra_body": {}}),
        ({"n_predict": 5}, {"n_predict": -1}),
    ],
)
async def test_what_would_change_the_tokens_is_refused_by_name(client, asks, is_harmless):
    await chat(client, **is_harmless)
    body = {"messages": [{"role": "user", "content": "hi"}], **asks}
    error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["code"], [error["param"]]) == ("unsupported_parameter", list(asks))


async def test_a_reply_can_repeat_the_message_that_it_goes_on_with(client, engine):
    engine.texts = (" a", " day")
    begun = {"role": "assistant", "content": [{"type": "text", "text": "An apple"}]}
    body = {"messages": [*HI, begun], "continue_final_message": True, "max_tokens": 2, "n": 2}
    for echo, text in ((True, "An apple a day"), (False, " a day")):
        whole = (await client.post("/v1/chat/completions", json={**body, "echo": echo})).json()
        assert [choice["message"]["content"] for choice in whole["choices"]] == [text] * 2
        assert whole["usage"]["completion_tokens"] == 4
        streamed = await client.post("/v1/chat/completions", json={**body, "echo": echo, "stream": True})
        chunks = [orjson.loads(line[6:]) for line in streamed.text.split("\n\n")[:-2]]
        for number in range(2):
            deltas = [
                choice["delta"] for each in chunks for choice in each["choices"] if choice["index"] == number
            ]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert "".join(delta.get("content", "") for delta in deltas) == text
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No,"}], "refusal": " not"}
    answered = await chat(client, **{**body, "messages": [*HI, refused]}, echo=True)
    assert answered["choices"][0]["message"]["content"] == "No, not a day"
    answered = await chat(client, messages=HI, echo=True)
    assert "hi" not in answered["choices"][0]["message"]["content"], "the last message is the user's"


async def test_a_model_without_a_template_says_so(client, engine):
    engine.model_info = dataclasses.replace(INFO, has_chat_template=False)
    response = await client.post("/v1/chat/completions", json={"messages": HI})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_chat_template"


def test_a_role_is_looked_for_in_a_long_template_once():
    def taken_s(role: str) -> float:
        messages = [ChatMessage(role=role, content="a")] * MAX_MESSAGES
        began_s = time.thread_time()
        template_messages(messages, "x" * 50_000 + "{{ m['role'] }}")
        return time.thread_time() - began_s

    assert min(taken_s("role") for _ in range(3)) < 8 * max(taken_s("user"), 0.01)
