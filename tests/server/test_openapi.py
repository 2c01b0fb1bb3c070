"""The document describes what is really there."""

import json
from collections import Counter

from pydantic import BaseModel

from server.api.operations.admin import LiveSequence
from server.app import build_app
from server.edge.http.endpoint import ReplyModel
from server.edge.wire_model import WireModel
from server.endpoints import OPEN_PATHS, PUBLIC
from tests.server.conftest import Settings, connect


async def test_it_describes_requests_replies_streams_and_errors(client):
    document = (await client.get("/openapi.json")).json()
    for path, request, chunk in (
        ("/v1/completions", "CompletionRequest", "Completion"),
        ("/v1/chat/completions", "ChatCompletionRequest", "ChatCompletionChunk"),
    ):
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{request}"}
        event = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
        done, json_data = event["properties"]["data"]["oneOf"]
        assert done == {"const": "[DONE]"}
        assert json_data["contentSchema"]["oneOf"][0] == {"$ref": f"#/components/schemas/{chunk}"}
        assert "suffix" in json.dumps(document["components"]["schemas"]) or path != "/v1/completions"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
            assert path.startswith(("/health", "/ping", "/metrics")) or "4XX" in operation["responses"], path


async def test_every_reference_leads_somewhere(client):
    text = (await client.get("/openapi.json")).text
    document = json.loads(text)
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references
    assert references <= set(document["components"]["schemas"])


async def test_fields_have_the_texts_of_their_classes_and_bodies_have_examples(client):
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    chat = schemas["ChatCompletionRequest"]["properties"]
    assert chat["max_completion_tokens"]["description"].startswith("The newer name of max_tokens"), "its own"
    assert "nice(1)" in chat["priority"]["description"], "of a class that it extends"
    shown = 0
    for endpoint in PUBLIC:
        for model in endpoint.requests:
            for example in schemas[model.__name__].get("examples", ()):
                model.model_validate(example)
                shown += 1
    assert shown >= 12


def test_a_rank_may_hold_a_time_limit_that_is_not_set():
    """Infinity, which JSON does not have, is written as null."""
    ranks = LiveSequence.model_json_schema()["properties"]["rank"]["items"]
    assert {"type": "null"} in ranks.get("anyOf", [])


async def test_a_guarded_server_documents_its_key(engine):
    app = build_app(engine, Settings(api_keys=("k",)))
    async with connect(app) as client:
        assert (await client.get("/openapi.json")).status_code == 401
        document = (await client.get("/openapi.json", headers={"authorization": "Bearer k"})).json()
    assert document["security"] == [{"key": []}]
    opened = {
        path
        for path, operations in document["paths"].items()
        if operations.get("get", {}).get("security") == []
    }
    assert opened == OPEN_PATHS


def test_no_two_models_share_the_one_place_that_the_document_has_for_their_name():
    models = [model for base in (WireModel, ReplyModel) for model in below(base)]
    assert {"Tool", "ResponseTool"} <= {model.__name__ for model in models}
    counts = Counter(model.__name__ for model in models if model.__module__.startswith("server."))
    assert not {name for name, count in counts.items() if count > 1}


def below(base: type[BaseModel]) -> set[type[BaseModel]]:
    """All subclasses, theirs included."""
    return {base}.union(*map(below, base.__subclasses__()))
