"""POST /v1/embeddings, /v1/score and /v1/rerank in front of an engine without a model."""

import asyncio
import base64
import struct
from dataclasses import replace

import pytest

from engine.errors import EngineUnavailable, Overloaded
from engine.options.api_keys import ApiKey, digest_of
from engine.types import PoolingFacts, PoolingTask, PromptComputation
from server.api.pooling.endpoints import Embeddings, Ranking, ScoreList
from server.api.pooling.protocol import MAX_INPUTS
from server.api.pooling.requests import MAX_TOKENS
from server.app import build_app
from server.edge.access.key_ring import KeyRing
from tests.server.conftest import Settings, connect, eventually
from tests.server.fake_engine import INFO, FakeEngine

EMBEDS = PoolingFacts(task=PoolingTask.EMBED, num_dimensions=3, prompt=PromptComputation.AT_ONCE)
SCORES = PoolingFacts(task=PoolingTask.SCORE, num_dimensions=1, prompt=PromptComputation.AT_ONCE)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(model_info=replace(INFO, pooling=EMBEDS))


@pytest.fixture
def scorer(engine: FakeEngine) -> FakeEngine:
    engine.model_info = replace(INFO, pooling=SCORES)
    return engine


async def embed(client, **body):
    return await client.post("/v1/embeddings", json=body)


@pytest.mark.parametrize(
    ("path", "alias", "body"),
    [
        ("/v1/score", "/score", {"text_1": "a", "text_2": ["b", "cd"]}),
        ("/v1/rerank", "/rerank", {"query": "a", "documents": ["b", "cd"]}),
        ("/v1/rerank", "/v2/rerank", {"query": "a", "documents": ["b", "cd"], "top_n": 1}),
    ],
)
async def test_clients_of_other_servers_find_it_at_their_path(client, scorer, path, alias, body):
    replies = [(await client.post(each, json=body)).json() for each in (path, alias)]
    for reply in replies:
        assert reply.pop("id")
        assert reply.pop("created", 0) >= 0
    assert replies[0] == replies[1]
    counted = f'http_requests_total{{limit="",method="POST",route="{alias}",status="200"}} 1.0'
    assert counted in (await client.get("/metrics")).text


def fault(response) -> tuple[int, str, str | None]:
    assert "error" in response.json(), response.text
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


# Embeddings.


async def test_a_text_becomes_one_vector_with_its_usage(client):
    response = await embed(client, input="abc", model="fake")
    assert response.status_code == 200
    Embeddings.model_validate(response.json())
    assert response.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [3.0, 98.0, 1.0]}],
        "model": "fake",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize(
    ("given", "lengths"),
    [(["a", "bcd"], [1, 3]), ([7, 8], [2]), ([[7, 8], [9]], [2, 1]), (["ab", [7]], [2, 1])],
)
async def test_each_shape_of_input_keeps_its_order(client, given, lengths):
    data = (await embed(client, input=given)).json()["data"]
    assert [item["index"] for item in data] == list(range(len(lengths)))
    assert [item["embedding"][0] for item in data] == lengths


async def test_base64_is_that_of_the_same_float32_numbers(client):
    floats = (await embed(client, input=["xyz", "q"])).json()["data"]
    packed = (await embed(client, input=["xyz", "q"], encoding_format="base64")).json()
    Embeddings.model_validate(packed)
    for item, plain in zip(packed["data"], floats, strict=True):
        numbers = struct.unpack("<3f", base64.b64decode(item["embedding"]))
        assert list(numbers) == plain["embedding"]


async def test_numbers_are_told_as_short_as_float32_allows(client, engine):
    text = (await embed(client, input=[1, 1, 2])).text
    assert "1.3333334," in text
    assert engine.pooled[0].params.prompt is PromptComputation.AT_ONCE


async def test_dimensions_cut_and_are_bounded_by_the_model(client):
    response = await embed(client, input="abc", dimensions=2)
    assert response.json()["data"][0]["embedding"] == [3.0, 98.0]
    assert fault(await embed(client, input="abc", dimensions=4)) == (400, "invalid_value", "dimensions")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": 5}, "input"),
        ({"input": [1, True]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": ["a", [-1]]}, "input[1]"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "user": 5}, "user"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "priority": "high"}, "priority"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "model": "gpt-4"}, "model"),
    ],
)
async def test_what_is_wrong_is_named(app, engine, body, param):
    async with connect(app) as client:
        response = await client.post("/v1/embeddings", json=body)
    assert 400 <= response.status_code <= 404
    assert fault(response)[2] == param
    assert not engine.pooled


async def test_an_input_that_is_too_long_is_refused_or_cut_if_asked(client, engine):
    too_long = "x" * (INFO.max_model_len + 1)
    assert fault(await embed(client, input=["a", too_long])) == (400, "context_length_exceeded", "input[1]")
    assert fault(await embed(client, input=too_long)) == (400, "context_length_exceeded", "input")
    response = await embed(client, input=[too_long, [7] * 200], truncate_prompt_tokens=-1)
    assert response.json()["usage"]["prompt_tokens"] == 2 * INFO.max_model_len
    response = await embed(client, input=[too_long, [5, 6, 7, 8]], truncate_prompt_tokens=3)
    assert [len(each.prompt_token_ids) for each in engine.pooled[-2:]] == [3, 3]
    assert engine.pooled[-1].prompt_token_ids == (5, 6, 7)
    await embed(client, input="x" * INFO.max_model_len)  # all of it may be prompt


async def test_the_tokens_of_one_request_are_bounded_in_all(engine):
    engine.model_info = replace(engine.model_info, max_model_len=MAX_TOKENS)
    part = [7] * (MAX_TOKENS // 16)
    async with connect(build_app(engine, Settings(max_body_bytes=2**22))) as client:
        assert fault(await embed(client, input=[part] * 17)) == (400, "invalid_value", "input")
        assert (await embed(client, input=[part] * 16)).status_code == 200


async def test_terms_reach_the_engine(client, engine):
    await client.post(
        "/v1/embeddings",
        json={"input": ["a", "b"], "user": "acme", "timeout": 5, "cache_salt": "s"},
        headers={"x-tokenyard-priority": "-3"},
    )
    for request in engine.pooled:
        assert request.terms.priority == -3
        assert request.terms.tenant == "acme"
        assert request.terms.cache_salt == "s"
        assert request.terms.time_limits.total_s == 5
    assert len({request.request_id for request in engine.pooled}) == 2


async def test_the_limit_of_a_keys_waiting_tokens_reaches_the_engine(engine):
    ring = KeyRing([ApiKey(name="a", digest=digest_of(b"sesame"), max_queued_tokens=500)])
    async with connect(build_app(engine, Settings(), keys=ring)) as client:
        client.headers["authorization"] = "Bearer sesame"
        assert (await embed(client, input=["a", "b"])).status_code == 200
    assert [request.max_tenant_tokens for request in engine.pooled] == [500, 500]


async def test_a_client_that_leaves_aborts_all_of_its_inputs(app, engine, url):
    engine.stall_after = 0
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    body = b'{"input": ["a", "b"]}'
    writer.write(
        b"POST /v1/embeddings HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await eventually(lambda: engine.num_running == 2)
    writer.close()
    await eventually(lambda: engine.num_running == 0)
    assert len(engine.aborted) == 2


async def test_a_full_queue_and_a_shutdown_are_told_as_for_text(client, engine):
    engine.admission_error = EngineUnavailable("bye", code="shutting_down")
    assert fault(await embed(client, input="a"))[:2] == (503, "shutting_down")
    engine.admission_error = Overloaded("full", retry_after_s=3)
    response = await embed(client, input="a")
    assert fault(response)[:2] == (429, "server_overloaded")
    assert response.headers["retry-after"] == "3"


# The right endpoint for the model.


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_a_model_that_generates_makes_no_vectors(client, engine, path, body):
    engine.model_info = INFO
    response = await client.post(path, json=body)
    assert fault(response) == (400, "wrong_task", "model")
    assert "generates text" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_a_model_that_pools_generates_no_text(client, engine, path, body):
    response = await client.post(path, json=body)
    assert fault(response) == (400, "wrong_task", "model")
    assert "does not generate" in response.json()["error"]["message"]


async def test_a_cross_encoder_makes_no_embeddings(client, scorer):
    response = await embed(client, input="a")
    assert fault(response) == (400, "wrong_task", "model")
    assert "/v1/rerank" in response.json()["error"]["message"]


# Scores.


async def test_a_cross_encoder_reads_both_texts_of_each_pair(client, scorer):
    response = await client.post("/v1/score", json={"text_1": "q", "text_2": ["ab", "cde"]})
    reply = response.json()
    ScoreList.model_validate(reply)
    assert [item["score"] for item in reply["data"]] == [4.0, 5.0]
    assert reply["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert [each.params.second_text_start for each in scorer.pooled] == [2, 2]


async def test_as_many_texts_are_scored_pair_by_pair(client, scorer):
    reply = (await client.post("/v1/score", json={"text_1": ["q", "qq"], "text_2": ["ab", "cd"]})).json()
    assert [item["score"] for item in reply["data"]] == [4.0, 5.0]
    response = await client.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})
    assert fault(response) == (400, "invalid_value", "text_1")


async def test_of_embeddings_the_score_is_the_cosine_and_each_text_is_computed_once(client, engine):
    reply = (await client.post("/v1/score", json={"text_1": "ab", "text_2": ["ab", "zzzz"]})).json()
    same, other = (item["score"] for item in reply["data"])
    assert same == pytest.approx(1.0)
    left, right = (2, 97.5, 1), (4, 122, 1)
    dot = sum(a * b for a, b in zip(left, right, strict=True))
    norms = sum(a * a for a in left) ** 0.5 * sum(b * b for b in right) ** 0.5
    assert other == pytest.approx(dot / norms)
    assert len(engine.pooled) == 3
    assert reply["usage"]["prompt_tokens"] == 8


async def test_documents_are_ranked_best_first(client, scorer):
    documents = ["a", "abcd", {"text": "ab"}]
    response = await client.post("/v1/rerank", json={"query": "q", "documents": documents})
    reply = response.json()
    Ranking.model_validate(reply)
    assert [item["index"] for item in reply["results"]] == [1, 2, 0]
    assert [item["document"]["text"] for item in reply["results"]] == ["abcd", "ab", "a"]
    assert [item["relevance_score"] for item in reply["results"]] == [6.0, 4.0, 3.0]


async def test_the_best_may_be_asked_for_without_their_texts(client, scorer):
    body = {"query": "q", "documents": ["a", "abcd", "ab"], "top_n": 2, "return_documents": False}
    results = (await client.post("/v1/rerank", json=body)).json()["results"]
    assert results == [{"index": 1, "relevance_score": 6.0}, {"index": 2, "relevance_score": 4.0}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * (MAX_INPUTS + 1)}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b" * 20, "b" * 200]}, "text_2[1]"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields"),
    ],
)
async def test_what_is_wrong_with_pairs_is_named(client, scorer, path, body, param):
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert fault(response)[2] == param
    assert not scorer.pooled


async def test_a_query_that_is_too_long_for_embeddings_is_named(client, engine):
    body = {"query": "a" * 200, "documents": ["b", "c"]}
    assert fault(await client.post("/v1/rerank", json=body))[2] == "query"
