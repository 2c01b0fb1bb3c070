"""Fields of a completion that change what comes back, through the whole application."""

import json
import threading
from dataclasses import replace

import pytest

from engine.types import FinishReason
from server.api.chat.models import ChatCompletion, ChatCompletionChunk
from server.api.completions import replies as completion_replies
from server.api.completions.completions import Completion
from server.app import build_app
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import EOS

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


async def complete(client, **body):
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    Completion.model_validate(response.json(), strict=True)
    return response.json()


async def refused(client, path=COMPLETIONS, **body) -> tuple[str, str]:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


async def chunks_of(client, path, **body):
    response = await client.post(path, json={"stream": True, **body})
    assert response.status_code == 200, response.text
    *blocks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
    for chunk in chunks:
        (Completion if path == COMPLETIONS else ChatCompletionChunk).model_validate(chunk, strict=True)
    return chunks


# Echo and the log-probabilities of prompts.


async def test_an_echo_with_logprobs_begins_with_the_prompts_and_null_for_its_first_token(client, engine):
    reply = await complete(client, prompt="hi!", max_tokens=2, echo=True, logprobs=1)
    choice = reply["choices"][0]
    assert choice["text"] == "hi!HI"
    assert choice["logprobs"] == {
        "tokens": ["h", "i", "!", "H", "I"],
        "token_logprobs": [None, -2.0, -2.0, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"A": -1.0, "i": -2.0},
            {"A": -1.0, "!": -2.0},
            {"A": -1.0, "H": -0.5},
            {"A": -1.0, "I": -0.5},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }
    assert engine.requests[0].params.num_prompt_logprobs == 1
    assert reply["usage"]["completion_tokens"] == 2


async def test_no_tokens_and_an_echo_give_the_prompt_alone(client, engine):
    reply = await complete(client, prompt=["hi", "yo"], max_tokens=0, echo=True, logprobs=0)
    assert [choice["text"] for choice in reply["choices"]] == ["hi", "yo"]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length", "length"]
    assert reply["choices"][1]["logprobs"]["tokens"] == ["y", "o"]
    assert reply["choices"][1]["logprobs"]["top_logprobs"] == [None, {"o": -2.0}]
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["usage"]["total_tokens"] == 4


async def test_no_tokens_hide_the_one_that_is_drawn_even_if_it_ends_the_text(client, engine):
    engine.end_as = FinishReason.STOP
    (choice,) = (await complete(client, prompt="hi", max_tokens=0, echo=True))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hi", "length", None)


async def test_without_an_echo_no_tokens_are_refused(client):
    assert (await refused(client, prompt="x", max_tokens=0))[0] == "max_tokens"
    assert (await refused(client, CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=0))[
        0
    ] == "max_tokens"


async def test_a_streamed_echo_carries_the_prompts_logprobs_in_its_first_chunk(client):
    chunks = await chunks_of(client, COMPLETIONS, prompt="hi", max_tokens=2, echo=True, logprobs=0, n=2)
    firsts = [chunk["choices"][0] for chunk in chunks[:2]]
    assert [choice["index"] for choice in firsts] == [0, 1]
    for choice in firsts:
        assert choice["text"] == "hiH"
        assert choice["logprobs"]["tokens"] == ["h", "i", "H"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert chunks[2]["choices"][0]["logprobs"]["text_offset"] == [3]


async def test_a_streamed_prompt_alone_is_one_chunk(client):
    (chunk,) = await chunks_of(client, COMPLETIONS, prompt="hi", max_tokens=0, echo=True, logprobs=1)
    assert chunk["choices"][0]["text"] == "hi"
    assert chunk["choices"][0]["finish_reason"] == "length"
    assert chunk["choices"][0]["logprobs"]["token_logprobs"] == [None, -2.0]


async def test_an_echo_of_token_ids_is_their_text(client):
    reply = await complete(client, prompt=[[104, EOS, 105], [104]], max_tokens=1, echo=True)
    assert [choice["text"] for choice in reply["choices"]] == ["h<eos>iH", "hH"], "it was asked for by its id"


async def test_prompt_logprobs_have_vllms_shape(client):
    reply = await complete(client, prompt="hi", max_tokens=1, prompt_logprobs=1)
    first, second = reply["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "105": {"logprob": -2.0, "rank": 30, "decoded_token": "i"},
        "65": {"logprob": -1.0, "rank": 1, "decoded_token": "A"},
    }
    assert list(second) == ["105", "65"]


@pytest.mark.parametrize(("asked", "echoed"), [(3, 1), (1, 3)])
async def test_prompt_logprobs_and_an_echo_may_ask_for_different_numbers(client, engine, asked, echoed):
    body = {"prompt": "hi", "max_tokens": 1, "echo": True}
    reply = await complete(client, **body, prompt_logprobs=asked, logprobs=echoed)
    (choice,) = reply["choices"]
    assert engine.requests[0].params.num_prompt_logprobs == 3
    assert len(choice["prompt_logprobs"][1]) == asked + 1
    assert len(choice["logprobs"]["top_logprobs"][1]) == echoed + 1


async def test_a_chat_tells_the_logprobs_of_its_prompt_too(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "prompt_logprobs": 0, "n": 2}
    response = await client.post(CHAT, json=body)
    ChatCompletion.model_validate(response.json(), strict=True)
    assert response.json()["prompt_logprobs"] == [
        None,
        {"105": {"logprob": -2.0, "rank": 30, "decoded_token": "i"}},
    ]
    assert "prompt_logprobs" not in response.json()["choices"][0]


async def test_a_chat_shows_prompt_logprobs_once_and_is_bounded_by_what_it_shows(client, engine):
    engine.model_info = replace(engine.model_info, max_model_len=4096)
    body = {"messages": [{"role": "user", "content": "x" * 900}], "max_tokens": 1, "n": 64}
    response = await client.post(CHAT, json={**body, "prompt_logprobs": 20})
    assert response.status_code == 200, response.text
    assert len(response.json()["prompt_logprobs"]) == 900


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_prompt_logprobs_are_not_streamed(client, path):
    messages = [{"role": "user", "content": "x"}]
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": messages}
    assert (await refused(client, path, **prompt, stream=True, prompt_logprobs=0))[0] == "prompt_logprobs"


async def test_the_number_of_logprobs_in_one_reply_is_bounded(engine):
    app = build_app(engine, Settings(max_body_bytes=2**20))
    async with connect(app) as client:
        body = {"prompt": ["x" * 100] * 8, "n": 128, "echo": True, "max_tokens": 0}
        param, message = await refused(client, **body, logprobs=10)
        assert param == "logprobs"
        assert "1048576" in message
        assert (await refused(client, **body, prompt_logprobs=10))[0] == "prompt_logprobs"
        assert engine.requests == []


# Best of.


async def test_the_best_have_the_highest_logprob_per_token_and_all_are_paid_for(client, engine):
    engine.choice_logprobs = (-3.0, -0.1, -2.0, -0.2)
    reply = await complete(client, prompt=["ab", "cd"], max_tokens=2, n=2, best_of=4, logprobs=0)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in reply["choices"]] == ["AB", "AB", "CD", "CD"]
    logprobs = [choice["logprobs"]["token_logprobs"] for choice in reply["choices"]]
    assert logprobs == [[-0.1, -0.1], [-0.2, -0.2], [-0.1, -0.1], [-0.2, -0.2]]
    assert reply["usage"]["completion_tokens"] == 16
    assert [request.n for request in engine.requests] == [4, 4]


async def test_best_of_needs_no_logprobs_in_the_reply(client, engine):
    reply = await complete(client, prompt="ab", best_of=2, max_tokens=1)
    assert [choice["logprobs"] for choice in reply["choices"]] == [None]
    assert engine.requests[0].params.num_logprobs == 0


async def test_best_of_is_at_least_n_and_not_streamed(client):
    assert await refused(client, prompt="x", n=3, best_of=2) == (
        "best_of",
        "best_of must be at least n, 3, not 2",
    )
    assert (await refused(client, prompt="x", best_of=2, stream=True))[0] == "best_of"
    assert (await refused(client, prompt=["x"] * 128, best_of=9))[0] == "best_of"
    assert len(await chunks_of(client, COMPLETIONS, prompt="x", n=2, best_of=2, max_tokens=1)) == 2


# What may be drawn.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_bad_words_and_allowed_tokens_reach_the_engine_as_tokens(client, engine, path):
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    body = {**prompt, "bad_words": ["ab", "c"], "allowed_token_ids": [7, 8, 7], "max_tokens": 2}
    assert (await client.post(path, json=body)).status_code == 200
    (request,) = engine.requests
    assert request.params.bad_words == ((97, 98), (99,))
    assert request.params.allowed_token_ids == (7, 8)


async def test_what_bans_every_allowed_token_is_refused(client):
    param, _ = await refused(client, prompt="x", allowed_token_ids=[97], bad_words=["a"])
    assert param == "allowed_token_ids"
    assert (await refused(client, prompt="x", allowed_token_ids=[EOS], min_tokens=1))[
        0
    ] == "allowed_token_ids"
    assert (await refused(client, prompt="x", allowed_token_ids=[300]))[0] == "allowed_token_ids"


# Prompts.


@pytest.mark.parametrize(
    ("asked", "kept"), [(2, "lo"), (5, "hello"), (100, "hello"), (-1, "hello"), (None, "hello")]
)
async def test_truncation_keeps_the_end_of_a_prompt(client, engine, asked, kept):
    for prompt in ("hello", list(b"hello")):
        reply = await complete(client, prompt=prompt, truncate_prompt_tokens=asked, echo=True, max_tokens=1)
        assert bytes(engine.requests[-1].prompt_token_ids).decode() == kept
        assert reply["choices"][0]["text"] == kept + kept[0].upper()
        assert reply["usage"]["prompt_tokens"] == len(kept)


async def test_minus_one_leaves_room_for_the_reply(client, engine):
    await complete(client, prompt="x" * 500, truncate_prompt_tokens=-1, max_tokens=28)
    assert len(engine.requests[-1].prompt_token_ids) == 100
    await complete(client, prompt="x" * 500, truncate_prompt_tokens=-1)
    assert len(engine.requests[-1].prompt_token_ids) == 112
    response = await client.post(
        CHAT,
        json={
            "messages": [{"role": "user", "content": "y" * 500}],
            "truncate_prompt_tokens": -1,
            "max_completion_tokens": 8,
        },
    )
    assert response.status_code == 200
    assert len(engine.requests[-1].prompt_token_ids) == 120


@pytest.mark.parametrize("asked", [0, 129])
async def test_a_truncation_that_makes_no_sense_names_the_bounds(client, asked):
    param, message = await refused(client, prompt="x", truncate_prompt_tokens=asked)
    assert param == "truncate_prompt_tokens"
    assert "-1 or from 1 to 128" in message


async def test_special_tokens_around_a_prompt_can_be_left_out(client, engine):
    await complete(client, prompt="x", add_special_tokens=False)
    assert engine.requests[-1].prompt_token_ids == (ord("x"), 1)
    await complete(client, prompt="x", add_special_tokens=True)
    assert engine.requests[-1].prompt_token_ids == (ord("x"),)


async def test_a_suffix_makes_a_prompt_with_a_hole(client, engine):
    engine.can_infill = True
    await complete(client, prompt="a", suffix="b")
    assert engine.requests[-1].prompt_token_ids == (2, 97, 3, 98, 4)
    await complete(client, prompt="a", suffix="")
    assert engine.requests[-1].prompt_token_ids == (97,)


async def test_a_suffix_needs_a_text_a_model_for_it_and_nothing_that_contradicts_it(client, engine):
    assert (await refused(client, prompt="a", suffix="b"))[0] == "suffix"
    engine.can_infill = True
    assert (await refused(client, prompt=[1], suffix="b"))[0] == "suffix"
    assert (await refused(client, prompt="a", suffix="b", echo=True))[0] == "suffix"
    assert (await refused(client, prompt="a", suffix="b", truncate_prompt_tokens=4))[0] == "suffix"


# Token ids.


async def test_token_ids_of_prompt_and_reply_are_told(client):
    reply = await complete(client, prompt=["hi", "a"], max_tokens=2, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [[104, 105], [97]]
    assert [choice["token_ids"] for choice in reply["choices"]] == [[0, 1], [0, 1]]
    reply = await complete(client, prompt="hi", max_tokens=2)
    assert reply["choices"][0]["prompt_token_ids"] is reply["choices"][0]["token_ids"] is None


async def test_streamed_token_ids_add_up_also_where_the_text_is_held_back(client, engine):
    engine.texts = ("", "a", "")
    chunks = await chunks_of(client, COMPLETIONS, prompt="hi", max_tokens=3, return_token_ids=True, n=2)
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [token_id for choice in mine for token_id in choice["token_ids"]] == [0, 1, 2]
        assert mine[0]["prompt_token_ids"] == [104, 105]
        assert all("prompt_token_ids" not in choice for choice in mine[1:])


async def test_a_chat_tells_token_ids_whole_and_streamed(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "return_token_ids": True}
    reply = (await client.post(CHAT, json=body)).json()
    ChatCompletion.model_validate(reply, strict=True)
    assert reply["prompt_token_ids"] == [104, 105]
    assert reply["choices"][0]["token_ids"] == [0, 1]
    chunks = await chunks_of(client, CHAT, **body)
    assert chunks[0]["prompt_token_ids"] == [104, 105]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    told = [chunk["choices"][0].get("token_ids", []) for chunk in chunks]
    assert [token_id for ids in told for token_id in ids] == [0, 1]


async def test_tokens_can_be_named_by_their_ids(client):
    reply = await complete(
        client, prompt="hi", max_tokens=1, logprobs=1, echo=True, return_tokens_as_token_ids=True
    )
    lists = reply["choices"][0]["logprobs"]
    assert lists["tokens"] == ["token_id:104", "token_id:105", "token_id:72"]
    assert lists["top_logprobs"][2] == {"token_id:65": -1.0, "token_id:72": -0.5}
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
    reply = (await client.post(CHAT, json={**body, "return_tokens_as_token_ids": True})).json()
    entry = reply["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == ("token_id:72", "token_id:65")
    assert entry["bytes"] == [72]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_made_of_a_long_scored_prompt_is_made_in_a_thread(client, engine, monkeypatch, stream):
    engine.model_info = replace(engine.model_info, max_model_len=1024)
    threads = []
    build = completion_replies.echoed_logprobs
    monkeypatch.setattr(
        completion_replies,
        "echoed_logprobs",
        lambda *args, **rest: threads.append(threading.current_thread()) or build(*args, **rest),
    )
    for length in (300, 200):
        body = {"prompt": "y" * length, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [False, True]
