"""Adapters through the whole application: chosen by `model`, listed, loaded and unloaded."""

import dataclasses

import pytest

from engine.options.api_keys import ApiKey, digest_of
from engine.types import ServedAdapter
from server.api.operations.models import ModelList
from server.app import build_app
from server.edge.access.key_ring import KeyRing
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import INFO, FakeEngine

SQL = ServedAdapter(name="sql", identity="sql@0", folder="/secret/place/sql", rank=8, created_s=5)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(model_info=dataclasses.replace(INFO, served_adapters=(SQL,)))


@pytest.mark.parametrize(
    ("path", "body", "reply_name"),
    [
        ("/v1/chat/completions", CHAT, "model"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}, "model"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, "model"),
        ("/v1/messages", CHAT, "model"),
        ("/api/chat", {"messages": CHAT["messages"], "stream": False}, "model"),
        ("/api/generate", {"prompt": "hi", "stream": False}, "model"),
    ],
)
async def test_every_endpoint_that_generates_chooses_an_adapter_by_model(
    client, engine, path, body, reply_name
):
    reply = await client.post(path, json={**body, "model": "sql"})
    assert reply.status_code == 200, reply.text
    assert engine.requests[-1].adapter == SQL
    assert reply.json()[reply_name] == "sql"
    await client.post(path, json={**body, "model": "fake"})
    assert engine.requests[-1].adapter is None


async def test_ollamas_tag_is_no_part_of_an_adapters_name(client, engine):
    await client.post("/api/chat", json={**CHAT, "model": "sql:latest", "stream": False, "max_tokens": None})
    assert engine.requests[-1].adapter == SQL


async def test_a_name_that_is_neither_model_nor_adapter_is_refused_with_those_there_are(client):
    reply = await client.post("/v1/completions", json={"prompt": "hi", "model": "sq"})
    assert reply.status_code == 404
    assert "there is: fake, org/fake-alias, sql" in reply.json()["error"]["message"]


async def test_models_list_adapters_with_their_parent_and_no_path(client):
    reply = await client.get("/v1/models")
    ModelList.model_validate(reply.json(), strict=True)
    *_, last = reply.json()["data"]
    assert (last["id"], last["root"], last["parent"], last["created"]) == ("sql", "sql", "fake", 5)
    assert "secret" not in reply.text
    assert (await client.get("/v1/models/sql")).json() == last
    assert (
        "sql:latest" in (await client.get("/api/tags")).text or "sql" in (await client.get("/api/tags")).text
    )


async def test_an_adapter_is_loaded_replaced_and_unloaded(client, engine):
    body = {"lora_name": "law", "lora_path": "good"}
    reply = await client.post(LOAD, json=body)
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'law' added successfully.")
    assert engine.model_info.adapter_named("law") is not None
    again = await client.post(LOAD, json=body)
    assert again.json()["error"]["code"] == "adapter_loaded"
    assert (await client.post(LOAD, json={**body, "load_inplace": True})).status_code == 200
    gone = await client.post(UNLOAD, json={"lora_name": "law"})
    assert gone.text == "Success: LoRA adapter 'law' removed successfully."
    assert (await client.post(UNLOAD, json={"lora_name": "law"})).status_code == 404
    assert (await client.post("/v1/completions", json={"prompt": "x", "model": "law"})).status_code == 404


async def test_an_adapter_that_is_unloaded_while_a_request_is_prepared_is_not_the_base(client, engine):
    async def unload_meanwhile(words):
        engine.unload_adapter("sql")
        return ()

    engine.encode_words = unload_meanwhile
    reply = await client.post("/v1/completions", json={"prompt": "hi", "model": "sql", "bad_words": ["x"]})
    assert reply.status_code == 404
    assert not engine.requests


async def test_without_a_directory_there_are_no_such_routes():
    async with connect(build_app(FakeEngine(), Settings(loads_adapters=False))) as client:
        for path in (LOAD, UNLOAD):
            assert (await client.post(path, json={"lora_name": "a", "lora_path": "b"})).status_code == 404
        assert LOAD not in (await client.get("/openapi.json")).text


async def test_only_a_key_that_may_administer_changes_adapters():
    keys = [
        ApiKey(name="user", digest=digest_of(b"user"), may_administer=False),
        ApiKey(name="boss", digest=digest_of(b"boss")),
    ]
    async with connect(build_app(FakeEngine(), Settings(), keys=KeyRing(keys))) as client:
        for path in (LOAD, UNLOAD):
            statuses = []
            for key in (None, "user", "boss"):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                body = {"lora_name": "a", "lora_path": "good"} if path == LOAD else {"lora_name": "a"}
                statuses.append((await client.post(path, json=body, headers=headers)).status_code)
            assert statuses == [401, 403, 200]


@pytest.mark.parametrize("body", [{}, {"lora_name": "a"}, {"lora_name": 5, "lora_path": "b"}, [], "x"])
async def test_a_body_that_is_no_load_is_refused(client, body):
    assert (await client.post(LOAD, json=body)).status_code == 400
