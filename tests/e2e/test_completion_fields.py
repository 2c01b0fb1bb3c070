"""The effect of each field of a completion, through HTTP, on a real model in a crowded server."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import torch

from engine.text.tokenizer import SpecialTokens, Tokenizer
from tests.e2e.serving import RunningServer
from tests.worker.transformers_generate import reference

PROMPT = "Once upon a time"
LONG = "Once upon a time the user and the assistant train on a yard of tokens. " * 2
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
async def client(crowded_server: RunningServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=crowded_server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def ids_of(client: httpx.AsyncClient, **body: Any) -> list[int]:
    """The generated tokens."""
    (choice,) = (await complete(client, **body, return_token_ids=True))["choices"]
    return choice["token_ids"]


async def refused(client: httpx.AsyncClient, **body: Any) -> str:
    response = await client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"]


# The prompt and its echo.


async def test_the_four_shapes_of_a_prompt_mean_the_same(client, tokenizer):
    ids = list(tokenizer.encode_prompt(PROMPT))
    texts = []
    for prompt in (PROMPT, [PROMPT], ids, [ids], [PROMPT, PROMPT], [ids, ids]):
        texts += [choice["text"] for choice in (await complete(client, prompt=prompt))["choices"]]
    assert len(texts) == 8
    assert len(set(texts)) == 1


async def test_an_echo_begins_the_text_and_offsets_point_into_it(client, tokenizer):
    shown = {"skip_special_tokens": False}
    plain = (await complete(client, **shown))["choices"][0]["text"]
    for prompt in (PROMPT, list(tokenizer.encode_prompt(PROMPT))):
        (choice,) = (await complete(client, prompt=prompt, echo=True, logprobs=3, **shown))["choices"]
        assert choice["text"] == PROMPT + plain
        lists = choice["logprobs"]
        assert lists["token_logprobs"][0] is None
        assert len(lists["tokens"]) == len(tokenizer.encode_prompt(PROMPT)) + 8
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert token.startswith("bytes:") or choice["text"].startswith(token, offset)


async def test_the_prompt_alone_is_scored_as_transformers_scores_it(client, tiny_model, tokenizer):
    body = {"prompt": [LONG, PROMPT], "echo": True, "logprobs": 2, "max_tokens": 0}
    reply = await complete(client, **body)
    assert reply["usage"]["completion_tokens"] == 0
    for prompt, choice in zip((LONG, PROMPT), reply["choices"], strict=True):
        assert choice["text"] == prompt
        check_scores(choice["logprobs"], prompt, tiny_model, tokenizer)


def check_scores(lists: dict[str, Any], prompt: str, model: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_prompt(prompt)
    with torch.inference_mode():
        logits = reference(model)(input_ids=torch.tensor([ids]), use_cache=False).logits
    expected = logits[0, :-1].float().log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()
    assert lists["token_logprobs"][0] is None
    assert lists["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)


async def test_prompts_are_scored_alike_in_a_crowd_with_cached_prefixes(client, tiny_model, tokenizer):
    prompts = [f"{LONG}{number}" for number in range(12)]
    await asyncio.gather(*(complete(client, prompt=prompt) for prompt in prompts))  # fills the prefix cache
    bodies = [{"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 20} for prompt in prompts]
    crowd = [complete(client, prompt=prompt, max_tokens=30) for prompt in prompts]
    replies = await asyncio.gather(*(complete(client, **body) for body in bodies), *crowd)
    for prompt, reply in zip(prompts, replies, strict=False):
        lists = reply["choices"][0]["logprobs"]
        num_prompt = len(tokenizer.encode_prompt(prompt))
        head = {"token_logprobs": lists["token_logprobs"][:num_prompt]}
        check_scores(head, prompt, tiny_model, tokenizer)
        assert None not in lists["token_logprobs"][1:]


async def test_what_an_evaluation_harness_sends_is_answered_as_it_reads_it(client, tokenizer):
    """Context and continuation as ids, one token to generate, which is dropped."""
    context, continuation = tokenizer.encode_prompt(PROMPT), tokenizer.encode_plain(" is", param="prompt")
    ids = [*context, *continuation]
    reply = await complete(client, prompt=[ids], echo=True, logprobs=1, max_tokens=1, seed=1234)
    lists = reply["choices"][0]["logprobs"]
    assert len(lists["token_logprobs"]) == len(ids) + 1
    scores = lists["token_logprobs"][len(context) : -1]
    best = [max(top.values()) for top in lists["top_logprobs"][len(context) : -1]]
    assert len(scores) == len(continuation)
    assert all(score <= top for score, top in zip(scores, best, strict=True))


async def test_prompt_logprobs_of_a_completion_and_of_a_chat(client, tokenizer):
    reply = await complete(client, prompt_logprobs=2, n=2)
    ids = tokenizer.encode_prompt(PROMPT)
    for choice in reply["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        for token_id, entries in zip(ids[1:], rest, strict=True):
            entry = entries[str(token_id)]
            assert entry["decoded_token"] == tokenizer.token_string(token_id)
            assert {1, 2} | {entry["rank"]} == {each["rank"] for each in entries.values()}
    chat = {"messages": [{"role": "user", "content": "hello"}], "prompt_logprobs": 0, "max_tokens": 1}
    body = (await client.post("/v1/chat/completions", json=chat)).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


async def test_a_streamed_echo_adds_up_to_the_whole_one(client):
    body = {"prompt": PROMPT, **GREEDY, "echo": True, "logprobs": 1, "n": 2}
    whole = (await complete(client, **body))["choices"]
    response = await client.post("/v1/completions", json={**body, "stream": True})
    chunks = [orjson.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == whole[index]["text"]
        for name, expected in whole[index]["logprobs"].items():
            found = [item for choice in mine for item in choice["logprobs"][name]]
            assert len(found) == len(expected)
            if name in ("tokens", "text_offset"):
                assert found == expected


async def test_truncation_and_special_tokens(client, tokenizer):
    ids = list(tokenizer.encode_prompt(LONG))
    for prompt in (LONG, ids):
        (choice,) = (await complete(client, prompt=prompt, truncate_prompt_tokens=5, return_token_ids=True))[
            "choices"
        ]
        assert choice["prompt_token_ids"] == ids[-5:]
    special = await complete(client, prompt=f"<|im_start|>{PROMPT}", return_token_ids=True)
    token_id = tokenizer.id_of("<|im_start|>")
    assert special["choices"][0]["prompt_token_ids"][0] == token_id
    kept = await complete(client, prompt=[token_id, *ids[:3]], echo=True, skip_special_tokens=False)
    assert kept["choices"][0]["text"].startswith("<|im_start|>Once")
    shown = await complete(client, prompt=[token_id, *ids[:3]], echo=True)
    assert shown["choices"][0]["text"].startswith("<|im_start|>Once"), "the client wrote it itself"


async def test_a_suffix_is_refused_by_a_model_without_tokens_for_it(client):
    assert await refused(client, suffix="the end") == "suffix"


# How many, how long, which.


async def test_n_and_best_of(client):
    body = {"temperature": 1.5, "seed": 3, "logprobs": 0}
    pool = (await complete(client, n=4, **body))["choices"]
    reply = await complete(client, n=2, best_of=4, **body)

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    best = sorted(pool, key=mean, reverse=True)[:2]
    assert [choice["text"] for choice in reply["choices"]] == [choice["text"] for choice in best]
    assert reply["usage"]["completion_tokens"] == sum(len(c["logprobs"]["tokens"]) for c in pool)


async def test_max_tokens_has_a_default_and_is_capped_by_the_context(client, crowded_server):
    ids = await ids_of(client, max_tokens=None, ignore_eos=True)
    assert len(ids) == 16
    model = (await client.get("/v1/models/tiny")).json()
    limit = model["max_model_len"]
    assert await refused(client, max_tokens=limit) == "max_tokens"
    assert await refused(client, prompt=[5] * limit) == "prompt"
    assert len(await ids_of(client, prompt=[5] * (limit - 3), max_tokens=None, ignore_eos=True)) == 3


async def test_stopping(client, tokenizer):
    free = await ids_of(client, ignore_eos=True, max_tokens=12)
    text = (await complete(client, ignore_eos=True, max_tokens=12))["choices"][0]["text"]
    stop = text[3:5]
    (choice,) = (await complete(client, stop=[stop, "never there"], max_tokens=12))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert choice["stop_reason"] == stop
    (choice,) = (await complete(client, stop=stop, include_stop_str_in_output=True, max_tokens=12))["choices"]
    assert choice["text"] == text[: text.index(stop) + len(stop)]
    (choice,) = (await complete(client, stop_token_ids=[free[2]], return_token_ids=True))["choices"]
    assert choice["token_ids"] == free[: free.index(free[2]) + 1]
    assert choice["stop_reason"] == free[2]
    assert len(await ids_of(client, stop_token_ids=[free[0]], min_tokens=4)) >= 4
    (eos,) = tokenizer.encode_rendered_chat(tokenizer.special_tokens["eos_token"])
    assert await ids_of(client, logit_bias={str(eos): 100}) == [eos]
    assert len(await ids_of(client, logit_bias={str(eos): 100}, ignore_eos=True)) == 8
    assert (await complete(client, stop=[str(n) for n in range(16)]))["choices"]
    assert await refused(client, stop=[str(n) for n in range(17)]) == "stop"


# What is drawn.


async def test_a_seed_gives_the_same_tokens_whoever_runs_beside_it(client):
    body = {"temperature": 1.5, "seed": 11, "max_tokens": 20}
    alone = await ids_of(client, **body)
    noise = [complete(client, prompt=f"{LONG}{n}", temperature=2, max_tokens=30) for n in range(10)]
    *_, together = await asyncio.gather(*noise, ids_of(client, **body))
    assert together == alone
    assert await ids_of(client, **{**body, "seed": 12}) != alone


async def test_each_way_to_choose_tokens_has_its_effect(client):
    greedy = await ids_of(client)
    assert await ids_of(client) == greedy
    hot = {"temperature": 2.0, "seed": 5}
    wild = await ids_of(client, **hot)
    assert wild != greedy
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0}, {"min_p": 1.0}):
        assert await ids_of(client, **hot, **narrow) == greedy, narrow
    assert await ids_of(client, **hot, top_k=0, top_p=1, min_p=0) == wild
    assert await ids_of(client, **hot, top_k=-1) == wild
    first = greedy[0]
    banned = await ids_of(client, logit_bias={str(first): -100})
    assert first not in banned[:1]
    assert set(await ids_of(client, logit_bias={"65": 100}, ignore_eos=True)) == {65}


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
async def test_penalties_make_repetition_rarer(client, penalty):
    body = {"max_tokens": 30, "ignore_eos": True, "logit_bias": {str(n): 20 for n in range(65, 85)}}
    free = await ids_of(client, **body)
    punished = await ids_of(client, **body, **{penalty: 10 if penalty == "repetition_penalty" else 2})
    assert len(set(punished)) > len(set(free))


async def test_bad_words_and_allowed_tokens(client, tokenizer):
    free = await ids_of(client, ignore_eos=True)
    word = tokenizer.decode(free[1:3], special=SpecialTokens.KEEP)
    if "\ufffd" not in word and word.strip():
        text = (await complete(client, bad_words=[word], ignore_eos=True))["choices"][0]["text"]
        assert text != tokenizer.decode(free, special=SpecialTokens.SKIP)
    ids = await ids_of(client, bad_words=[tokenizer.token_string(65)], logit_bias={"65": 100, "66": 50})
    assert 65 not in ids
    assert 66 in ids
    assert set(await ids_of(client, allowed_token_ids=[70, 71], temperature=2, ignore_eos=True)) <= {70, 71}


async def test_twenty_logprobs_and_no_more(client):
    (choice,) = (await complete(client, logprobs=20, max_tokens=3))["choices"]
    for top, logprob in zip(
        choice["logprobs"]["top_logprobs"], choice["logprobs"]["token_logprobs"], strict=True
    ):
        assert 19 <= len(top) <= 21  # tokens of one name share a key
        assert max(top.values()) == pytest.approx(logprob)
        assert sum(map(math.exp, top.values())) <= 1.0001
    assert await refused(client, logprobs=21) == "logprobs"


# Terms of service.


async def test_named_tokens_are_reported_with_the_numbers_that_the_likeliest_have(client, tokenizer):
    asked = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    (ranked,) = (await complete(client, logprobs=20, **asked))["choices"]
    best = ranked["logprobs"]["top_logprobs"]
    wanted = [int(name.removeprefix("token_id:")) for name in best[0]][:0:-1]
    (named,) = (await complete(client, logprobs=0, logprob_token_ids=wanted, **asked))["choices"]
    assert named["text"] == ranked["text"]
    first = named["logprobs"]["top_logprobs"][0]
    assert list(first)[1:] == [f"token_id:{each}" for each in wanted], "the token drawn, then those asked for"
    assert first == pytest.approx(best[0], abs=1e-4)
    chat = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2, **GREEDY}
    reply = await client.post("/v1/chat/completions", json={**chat, "logprob_token_ids": [5, 6, 7, 8]})
    for token in reply.json()["choices"][0]["logprobs"]["content"]:
        assert token["top_logprobs"][0] == {name: token[name] for name in ("token", "logprob", "bytes")}
        named_bytes = [bytes(entry["bytes"]) for entry in token["top_logprobs"][1:]]
        assert named_bytes == [tokenizer.token_bytes(each) for each in (5, 6, 7, 8)]


async def test_tokens_are_named_where_there_are_log_probabilities(client):
    assert await refused(client, logprob_token_ids=[1]) == "logprob_token_ids"
    assert await refused(client, logprob_token_ids=[10**6], logprobs=1) == "logprob_token_ids"
    alone = {"echo": True, "logprobs": 1, "max_tokens": 0}
    assert await refused(client, logprob_token_ids=[1], **alone) == "logprob_token_ids"
    chat = {"messages": [{"role": "user", "content": "hello"}], "logprob_token_ids": [1]}
    reply = await client.post("/v1/chat/completions", json=chat)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprob_token_ids")


async def test_priority_cache_salt_and_user_are_taken_and_the_salt_parts_the_cache(client):
    def cached(reply: dict[str, Any]) -> int:
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    prompt = f"{LONG}and a prompt of its own"
    common = {"prompt": prompt, "priority": -3, "user": "ada"}
    assert cached(await complete(client, **common, cache_salt="one")) == 0
    assert cached(await complete(client, **common, cache_salt="one")) > 0
    assert cached(await complete(client, **common, cache_salt="two")) == 0


async def test_a_timeout_ends_a_request_with_what_it_has_or_with_504(client):
    response = await client.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 150, "timeout": 1e-6, "ignore_eos": True}
    )
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


async def test_usage_comes_at_the_end_or_in_every_chunk(client):
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        body = {"prompt": PROMPT, **GREEDY, "stream": True, "stream_options": options, "ignore_eos": True}
        text = (await client.post("/v1/completions", json=body)).text
        chunks = [orjson.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 8
        in_between = [chunk["usage"] for chunk in chunks[:-1]]
        if len(options) == 1:
            assert set(map(str, in_between)) == {"None"}
        else:
            counts = [usage["completion_tokens"] for usage in in_between]
            assert counts == sorted(counts)


async def test_tokenize_and_detokenize_agree_with_what_is_billed(client):
    tokens = (await client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True})).json()
    assert tokens["count"] == (await complete(client))["usage"]["prompt_tokens"]
    assert tokens["token_strs"][-1] == "Ġtime"
    back = await client.post("/detokenize", json={"tokens": tokens["tokens"]})
    assert back.json() == {"prompt": PROMPT}
    messages = [{"role": "user", "content": "hello"}]
    count = (await client.post("/tokenize", json={"messages": messages})).json()["count"]
    chat = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert chat.json()["usage"]["prompt_tokens"] == count
