"""POST /v1/completions, through the whole application."""

import pytest

from engine.types import FinishReason
from server.api.completions.completions import Completion
from tests.server.fake_engine import EOS


async def complete(client, **body):
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    Completion.model_validate(response.json(), strict=True)
    return response.json()


async def test_a_prompt_is_continued_and_the_tokens_are_counted(client):
    reply = await complete(client, prompt="hello", max_tokens=3)
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "HEL",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert reply["model"] == "fake"
    assert reply["id"].startswith("cmpl-")


async def test_choices_are_numbered_by_prompt_first(client, engine):
    reply = await complete(client, prompt=["a", "b"], max_tokens=2, n=2)
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "AA"),
        (1, "AA"),
        (2, "BB"),
        (3, "BB"),
    ]
    assert reply["usage"]["prompt_tokens"] == 2
    assert reply["usage"]["completion_tokens"] == 8
    assert len({request.request_id for request in engine.requests}) == 2


async def test_token_ids_are_taken_as_they_are(client, engine):
    await complete(client, prompt=[104, 105], max_tokens=1)
    await complete(client, prompt=[[104], [105, 106]], max_tokens=1)
    assert [request.prompt_token_ids for request in engine.requests] == [(104, 105), (104,), (105, 106)]


async def test_echo_puts_the_prompt_before_each_choice(client):
    reply = await complete(client, prompt=["ab", "cd"], max_tokens=1, echo=True)
    assert [choice["text"] for choice in reply["choices"]] == ["abA", "cdC"]


async def test_echo_comes_once_in_a_stream(client):
    body = {"prompt": "ab", "max_tokens": 2, "echo": True, "stream": True}
    response = await client.post("/v1/completions", json=body)
    assert response.text.count('"text":"abA"') == 1
    assert response.text.count('"text":"ab') == 1


async def test_logprobs_come_in_parallel_lists(client):
    reply = await complete(client, prompt="hi", max_tokens=2, logprobs=1)
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["H", "I"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"A": -1.0, "H": -0.5}, {"A": -1.0, "I": -0.5}],
        "text_offset": [0, 1],
    }


async def test_the_default_is_sixteen_tokens_or_the_room_there_is(client, engine):
    await complete(client, prompt="x")
    await complete(client, prompt="x" * 120)
    assert [request.params.max_tokens for request in engine.requests] == [16, 8]


async def test_a_top_p_of_zero_is_no_mistake(client, engine):
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ):
        assert (await client.post(path, json={**body, "top_p": 0})).status_code == 200
        assert engine.requests[-1].params.top_p == 0


async def test_every_field_reaches_the_engine(client, engine):
    await complete(
        client,
        model="org/fake-alias",
        prompt="x",
        max_tokens=9,
        min_tokens=2,
        n=3,
        stop=["a", "b"],
        stop_token_ids=[7],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        temperature=0,
        top_p=0.5,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"12": -100, "3": 5.5},
        seed=-1,
        logprobs=2,
        priority=-3,
        cache_salt="salt",
    )
    (request,) = engine.requests
    params = request.params
    assert (request.n, request.stop) == (3, ("a", "b"))
    assert (request.terms.priority, request.terms.cache_salt) == (-3, "salt")
    assert (request.include_stop_str_in_output, request.skip_special_tokens) == (True, False)
    assert (params.max_tokens, params.min_tokens, params.num_logprobs) == (9, 2, 2)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 5, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, -1, 2)
    assert params.logit_bias == ((3, 5.5), (12, -100.0))
    assert params.seed == 2**64 - 1
    assert params.stop_token_ids == (EOS, 7)


async def test_the_checkpoints_sampling_is_the_default_and_openais_where_it_has_none(client, engine):
    await complete(client, prompt="x", ignore_eos=True, stop="z")
    (request,) = engine.requests
    assert (request.params.temperature, request.params.top_k) == (0.5, 40)
    assert (request.params.top_p, request.params.min_p, request.params.repetition_penalty) == (1.0, 0.0, 1.0)
    assert request.params.stop_token_ids == ()
    assert request.stop == ("z",)


@pytest.mark.parametrize(("asked", "top_k"), [(-1, 0), (0, 0), (1, 1), (299, 299), (300, 0), (2**31 - 1, 0)])
async def test_a_top_k_that_keeps_all_tokens_is_none(client, engine, asked, top_k):
    await complete(client, prompt="x", top_k=asked)
    assert engine.requests[0].params.top_k == top_k


async def test_cache_hits_are_those_of_the_first_choice(client):
    """The others find the blocks that the first has just filled: that is sharing, not a cached prompt."""
    reply = await complete(client, prompt=["a", "b"], n=2)
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_requests_without_a_seed_draw_different_ones(client, engine):
    await complete(client, prompt=["x", "x"])
    seeds = {request.params.seed for request in engine.requests}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_a_null_is_an_absent_field(client):
    nulls = (
        "model",
        "n",
        "stop",
        "seed",
        "logprobs",
        "suffix",
        "logit_bias",
        "stream",
        "stream_options",
        "user",
    )
    await complete(client, prompt="x", **dict.fromkeys(nulls))


async def test_an_empty_stop_string_is_an_absent_one(client, engine):
    await complete(client, prompt="x", stop="")
    assert engine.requests[-1].stop == ()


async def test_an_expired_reply_is_one_that_the_document_describes(client, engine):
    engine.end_as = FinishReason.EXPIRED
    assert (await complete(client, prompt="x"))["choices"][0]["finish_reason"] == "timeout"


async def test_harmless_fields_are_accepted(client):
    await complete(
        client, prompt="x", user="ada", metadata={"a": "b"}, store=False, service_tier="auto", best_of=1
    )


async def test_unknown_fields_are_ignored_but_counted(client, engine):
    await complete(client, prompt="x", frobnicate=1, suffix=None)
    value = engine.metrics.registry.get_sample_value("tokenyard:unknown_request_fields_total")
    assert value == 1


async def test_the_number_of_choices_in_one_request_is_bounded(client, engine):
    response = await client.post("/v1/completions", json={"prompt": ["x"] * 128, "n": 9})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_when_one_prompt_fails_all_are_given_up(client, engine, stream):
    engine.admission_error = None
    engine.error_after, engine.error = 1, RuntimeError("secret path /root")
    response = await client.post(
        "/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 5, "stream": stream}
    )
    assert "secret" not in response.text
    assert "internal_error" in response.text
    assert engine.num_running == 0
    assert len(engine.aborted) == len(engine.requests)
