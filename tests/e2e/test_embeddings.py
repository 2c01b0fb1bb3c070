"""Embeddings and rankings from a real server: what the SDK sees, and that nothing is left behind."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.e2e.serving import RunningServer, running_server, wait_for
from tests.pooling_checkpoints import make_embedder, make_scorer, write_pooling_files

pytestmark = pytest.mark.night

TEXTS = ["hello world", "the train is in time", "Once upon a time that you token it", "a"]
CROWDED = ("--num-gpu-blocks-override", "8", "--block-size", "8", "--max-num-seqs", "8")
PRIORITIES = ("--scheduling-policy", "priority", "--max-num-batched-tokens", "16", "--enable-admin")
FLOAT32 = ("--dtype", "float32", "--num-threads", "1", "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_embedder("bert", tmp_path_factory.mktemp("models") / "encoder")
    write_pooling_files(folder, "mean")
    return folder


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_embedder("qwen3", tmp_path_factory.mktemp("models") / "decoder")
    write_pooling_files(folder, "lasttoken")
    return folder


@pytest.fixture(scope="module")
def scorer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scorer("bert", tmp_path_factory.mktemp("models") / "scorer")


@pytest.fixture(scope="module")
def encoder(encoder_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("encoder"), str(encoder_folder), *FLOAT32) as server:
        yield server


@pytest.fixture(scope="module")
def decoder(decoder_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Few blocks and small steps: prompts come in chunks, and urgent ones send others away."""
    options = (*FLOAT32, *CROWDED, *PRIORITIES)
    with running_server(tmp_path_factory.mktemp("decoder"), str(decoder_folder), *options) as server:
        yield server


@pytest.fixture(scope="module")
def scorer(scorer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("scorer"), str(scorer_folder), *FLOAT32) as server:
        yield server


@contextmanager
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def embed(server: RunningServer, given: object, **fields: Any) -> Any:
    """The SDK's whole reply. It asks for base64 by itself."""
    with sdk(server) as client:
        return client.embeddings.create(model="tiny", input=given, **fields)  # type: ignore[arg-type]


def token_ids(folder: Path, *texts: str) -> tokenizers.Encoding:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(*texts)


@cache
def reference(folder: Path, auto_class: Any = AutoModel) -> Any:
    torch.set_num_threads(1)  # the server computes beside us
    return auto_class.from_pretrained(folder, dtype=torch.float32).eval()


def hidden_states(folder: Path, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(folder)(input_ids=torch.tensor([ids])).last_hidden_state[0]


def test_the_sdk_gets_the_models_vectors(encoder: RunningServer, encoder_folder: Path) -> None:
    reply = embed(encoder, TEXTS)
    assert [item.index for item in reply.data] == [0, 1, 2, 3]
    num_tokens = 0
    for text, item in zip(TEXTS, reply.data, strict=True):
        ids = token_ids(encoder_folder, text).ids
        num_tokens += len(ids)
        expected = functional.normalize(hidden_states(encoder_folder, ids).mean(dim=0), dim=0)
        np.testing.assert_allclose(item.embedding, expected.numpy(), atol=2e-5)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (num_tokens, num_tokens)


def test_floats_and_base64_and_token_ids_give_equal_vectors(
    encoder: RunningServer, encoder_folder: Path
) -> None:
    packed = embed(encoder, TEXTS[0])
    plain = embed(encoder, TEXTS[0], encoding_format="float")
    ids = embed(encoder, token_ids(encoder_folder, TEXTS[0]).ids)
    assert np.array_equal(np.float32(packed.data[0].embedding), np.float32(plain.data[0].embedding))
    np.testing.assert_allclose(ids.data[0].embedding, plain.data[0].embedding, atol=1e-6)


def test_dimensions_are_cut_and_normalized(encoder: RunningServer) -> None:
    whole = embed(encoder, "hello").data[0].embedding
    cut = embed(encoder, "hello", dimensions=8).data[0].embedding
    np.testing.assert_allclose(cut, np.array(whole[:8]) / np.linalg.norm(whole[:8]), atol=1e-6)


def test_a_text_is_cut_inside_its_special_tokens(encoder: RunningServer, encoder_folder: Path) -> None:
    text = "hello world " * 100
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        embed(encoder, text)
    reply = embed(encoder, text, extra_body={"truncate_prompt_tokens": 9})
    whole = token_ids(encoder_folder, text).ids
    expected = hidden_states(encoder_folder, [*whole[:8], whole[-1]]).mean(dim=0)
    np.testing.assert_allclose(
        reply.data[0].embedding, functional.normalize(expected, dim=0).numpy(), atol=2e-5
    )
    assert reply.usage.prompt_tokens == 9
    longest = embed(encoder, text, extra_body={"truncate_prompt_tokens": -1})
    assert longest.usage.prompt_tokens == 128


def test_an_encoder_answers_a_crowd_and_is_idle_afterwards(encoder: RunningServer) -> None:
    inputs = [list(range(5, 6 + number % 90)) for number in range(400)]
    reply = embed(encoder, inputs)
    again = embed(encoder, inputs[7])
    np.testing.assert_allclose(reply.data[7].embedding, again.data[0].embedding, atol=2e-5)
    encoder.wait_until_idle()


def test_an_encoder_does_not_generate_and_says_so(encoder: RunningServer) -> None:
    with sdk(encoder) as client:
        with pytest.raises(openai.BadRequestError, match="does not generate text") as caught:
            client.completions.create(model="tiny", prompt="hello")
        assert caught.value.code == "wrong_task"
        assert client.models.list().data[0].id == "tiny"


def expected_last(folder: Path, ids: list[int]) -> np.ndarray:
    return functional.normalize(hidden_states(folder, ids)[-1], dim=0).numpy()


async def test_preempted_chunked_and_mixed_prompts_give_the_same_vectors(
    decoder: RunningServer, decoder_folder: Path
) -> None:
    prompts = [[(7 * place + number) % 290 + 5 for place in range(60)] for number in range(300)]

    async def post(client: httpx.AsyncClient, inputs: list[list[int]], priority: int) -> list[list[float]]:
        body = {"input": inputs, "priority": priority}
        reply = await client.post(f"{decoder.url}/v1/embeddings", json=body)
        assert reply.status_code == 200, reply.text
        return [item["embedding"] for item in reply.json()["data"]]

    preempted = decoder.metric("tokenyard:num_preemptions_total")
    async with httpx.AsyncClient(timeout=60) as client:
        slow = asyncio.create_task(post(client, prompts[30:], 5))
        await decoder.until_in_flight(150, slow)
        for ids in prompts[:30]:
            (urgent,) = await post(client, [ids], -5)
            assert not slow.done(), "the urgent one waited for all others"
            np.testing.assert_allclose(urgent, expected_last(decoder_folder, ids), atol=2e-5)
            if decoder.metric("tokenyard:num_preemptions_total") > preempted:
                break
        else:
            pytest.fail("nobody was preempted")
        vectors = await slow
    for ids, vector in list(zip(prompts[30:], vectors, strict=True))[::30]:
        np.testing.assert_allclose(vector, expected_last(decoder_folder, ids), atol=2e-5)
    decoder.wait_until_idle()


def test_a_shared_prefix_is_taken_from_the_cache(decoder: RunningServer, decoder_folder: Path) -> None:
    shared = list(range(100, 132))
    hits = decoder.metric("tokenyard:prefix_cache_hits_total")
    for last in (7, 8):
        reply = embed(decoder, [*shared, last])
        expected = expected_last(decoder_folder, [*shared, last])
        np.testing.assert_allclose(reply.data[0].embedding, expected, atol=2e-5)
    # The engine tells its counters a few times a second.
    wait_for(lambda: decoder.metric("tokenyard:prefix_cache_hits_total") == hits + 32)


async def test_a_client_that_leaves_leaves_nothing_behind(decoder: RunningServer) -> None:
    aborts = decoder.metric("tokenyard:request_aborts_total")
    body = {"input": [[number % 200 + 5] * 60 for number in range(200)]}
    async with httpx.AsyncClient(timeout=60) as client:
        task = asyncio.create_task(client.post(f"{decoder.url}/v1/embeddings", json=body))
        await decoder.until_in_flight(100, task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    decoder.wait_until_idle()
    assert decoder.metric("tokenyard:request_aborts_total") > aborts


def test_a_deadline_is_kept(decoder: RunningServer) -> None:
    body = {"input": [[number % 200 + 5] * 60 for number in range(100)], "timeout": 0.01}
    reply = httpx.post(f"{decoder.url}/v1/embeddings", json=body, timeout=30)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    decoder.wait_until_idle()


def expected_score(folder: Path, first: str, second: str) -> float:
    model = reference(folder, AutoModelForSequenceClassification)
    encoding = token_ids(folder, first, second)
    assert 1 in encoding.type_ids
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])
        ).logits
    return float(torch.sigmoid(logits[0, 0]))


def test_a_cross_encoder_ranks_documents(scorer: RunningServer, scorer_folder: Path) -> None:
    query, documents = "hello world", TEXTS
    body = {"query": query, "documents": documents, "top_n": 3}
    results = httpx.post(f"{scorer.url}/v1/rerank", json=body).json()["results"]
    expected = [expected_score(scorer_folder, query, each) for each in documents]
    order = sorted(range(len(documents)), key=lambda index: -expected[index])[:3]
    assert [item["index"] for item in results] == order
    for item in results:
        assert item["relevance_score"] == pytest.approx(expected[item["index"]], abs=2e-5)
        assert item["document"] == {"text": documents[item["index"]]}


def test_scores_are_those_of_the_pairs_and_long_pairs_are_cut(
    scorer: RunningServer, scorer_folder: Path
) -> None:
    body = {"text_1": TEXTS[:2], "text_2": TEXTS[2:]}
    data = httpx.post(f"{scorer.url}/v1/score", json=body).json()["data"]
    for item, first, second in zip(data, TEXTS[:2], TEXTS[2:], strict=True):
        assert item["score"] == pytest.approx(expected_score(scorer_folder, first, second), abs=2e-5)
    long = {"text_1": "hello", "text_2": "hello " * 300}
    refused = httpx.post(f"{scorer.url}/v1/score", json=long)
    assert refused.json()["error"]["param"] == "text_2"
    reply = httpx.post(f"{scorer.url}/v1/score", json={**long, "truncate_prompt_tokens": 20})
    assert reply.json()["usage"]["prompt_tokens"] == 20


def test_of_embeddings_the_score_is_the_cosine(encoder: RunningServer) -> None:
    body = {"text_1": TEXTS[0], "text_2": [TEXTS[0], TEXTS[1]]}
    same, other = (item["score"] for item in httpx.post(f"{encoder.url}/v1/score", json=body).json()["data"])
    first, second = (np.array(item.embedding) for item in embed(encoder, TEXTS[:2]).data)
    assert same == pytest.approx(1.0, abs=1e-5)
    assert other == pytest.approx(float(first @ second), abs=1e-5)
