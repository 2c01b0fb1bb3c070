"""POST /tokenize and /detokenize, through the whole application."""

import asyncio
import dataclasses

import pytest

from server.api.operations.tokenization import MAX_DECODED_TOKENS, Detokenization, Tokenization
from server.app import build_app
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import EOS


async def tokenize(client, **body):
    response = await client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    Tokenization.model_validate(response.json(), strict=True)
    return response.json()


async def test_a_prompt_becomes_tokens(client):
    assert await tokenize(client, prompt="hi", model="fake") == {
        "count": 2,
        "max_model_len": 128,
        "tokens": [104, 105],
        "token_strs": None,
    }
    assert (await tokenize(client, prompt="hi", add_special_tokens=False))[
        "count"
    ] == 3  # the fake adds a mark
    assert (await tokenize(client, prompt="hi", return_token_strs=True))["token_strs"] == ["<104>", "<105>"]
    assert (await tokenize(client, prompt="x" * 1000))["count"] == 1000  # may be longer than the context


async def test_a_long_reply_is_written_piece_by_piece_and_others_have_their_turn(client, monkeypatch):
    monkeypatch.setattr("server.api.operations.tokenization._PIECE_TOKENS", 3)
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    beside = asyncio.create_task(take_turns())
    short = await tokenize(client, prompt="", return_token_strs=True)
    num_of_short, num_turns = num_turns, 0
    reply = await tokenize(client, prompt="abcdefgh" * 50, return_token_strs=True)
    beside.cancel()
    assert (short["tokens"], short["token_strs"]) == ([], [])
    assert reply["tokens"] == [*b"abcdefgh"] * 50
    assert reply["token_strs"] == [f"<{token}>" for token in reply["tokens"]]
    assert num_turns >= num_of_short + 400 // 3


async def test_special_tokens_are_put_around_messages_where_that_is_asked(client, engine, monkeypatch):
    async def encode(text: str) -> tuple[int, ...]:
        return (250, *await engine.encode_plain(text), 251)

    async def encode_plain(text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    monkeypatch.setattr(engine, "encode_plain", encode_plain)
    monkeypatch.setattr(engine, "encode", encode)
    messages = [{"role": "user", "content": "hi"}]
    plain = (await tokenize(client, messages=messages, add_special_tokens=False))["tokens"]
    around = (await tokenize(client, messages=messages, add_special_tokens=True))["tokens"]
    assert around == [250, *plain, 251]


async def test_messages_become_what_a_chat_would_generate_from(client, engine):
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    assert (await tokenize(client, messages=messages, chat_template_kwargs={"a": 1}))["count"] == 4
    rendered, options = engine.chats[-1]
    assert rendered == [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert options.final == "answer"
    assert options.kwargs == {"a": 1}
    engine.model_info = dataclasses.replace(engine.model_info, chat_template="<tool_call>")
    await tokenize(client, messages=messages, tools=[{"type": "function", "function": {"name": "f"}}])
    assert engine.chats[-1][1].tools[0]["function"]["name"] == "f"
    await tokenize(client, messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert engine.chats[-1][1].final == "continue"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": ["a"]}, 400, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ({"prompt": "a", "thinking": {"type": "disabled"}}, 400, "thinking"),
        ({"prompt": "a", "reasoning": {"effort": "low"}}, 400, "reasoning"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}, 400, "chat_template"),
        ({"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "model"),
    ],
)
async def test_what_is_wrong_is_named(client, body, status, param):
    response = await client.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_tokens_become_text_with_special_tokens_in_it(client):
    response = await client.post("/detokenize", json={"tokens": [104, EOS, 105]})
    assert response.json() == {"prompt": "h<eos>i"}
    Detokenization.model_validate(response.json(), strict=True)
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize("tokens", [[300], [-1], [2**70], [True], ["a"], "a", None])
async def test_tokens_that_are_none_are_refused(client, tokens):
    response = await client.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")
    if tokens == [300]:
        assert "from 0 to 299" in response.json()["error"]["message"]


async def test_a_served_name_with_a_slash_can_be_retrieved_and_others_are_not_found(client):
    response = await client.get("/v1/models/org/fake-alias")
    assert response.json()["id"] == "org/fake-alias"
    for unknown in ("gpt-4", "org", "org/fake-alias/x", "fake/"):
        response = await client.get(f"/v1/models/{unknown}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert response.json()["error"]["param"] == "model"


async def test_names_of_a_pattern_are_taken_and_no_list_has_them(client, engine):
    engine.model_info = dataclasses.replace(engine.model_info, name_patterns=("gpt-*o", "claude*"))
    for name in ("gpt-4o", "gpt-o", "claude", "claude-opus/x"):
        assert (await tokenize(client, prompt="hi", model=name))["count"] == 2
        assert (await client.get(f"/v1/models/{name}")).json()["root"] == "fake"
    for name in ("gpt-", "gpto", "GPT-4o", "a-claude"):
        response = await client.post("/tokenize", json={"prompt": "hi", "model": name})
        assert response.status_code == 404
        assert "there is: gpt-*o, claude*, fake" in response.json()["error"]["message"]
    listed = (await client.get("/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == ["fake", "org/fake-alias"]


async def test_more_tokens_than_are_decoded_at_a_time_are_refused(engine):
    app = build_app(engine, Settings(max_body_bytes=1 << 20))
    async with connect(app) as client:
        reply = await client.post("/detokenize", json={"tokens": [104] * MAX_DECODED_TOKENS})
        assert len(reply.json()["prompt"]) == MAX_DECODED_TOKENS
        reply = await client.post("/detokenize", json={"tokens": [104] * (MAX_DECODED_TOKENS + 1)})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")
