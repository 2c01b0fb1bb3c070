"""Every bound of every field: what lies just beyond it is refused, with the bound in the words.

The bounds are read from the request models themselves, so that a new field cannot be forgotten.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson
import pytest

from server.api.chat.protocol import ChatCompletionRequest
from server.api.completions.protocol import CompletionRequest
from server.api.operations.tokenization import DetokenizeRequest, TokenizeRequest
from server.app import build_app
from server.edge.wire_model import WireModel
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "x"}]
ENDPOINTS: dict[str, tuple[type[WireModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES}),
    "/tokenize": (TokenizeRequest, {}),
    "/detokenize": (DetokenizeRequest, {"tokens": []}),
}
AN_OBJECT = {
    "ChatMessage": MESSAGES[0],
    "Tool": {"type": "function", "function": {"name": "f"}},
}
TOO_LARGE_TO_SEND = 10**6


class Case(NamedTuple):
    path: str
    field: str
    value: Any
    bound: str


def beyond(schema: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Values just outside of what a schema allows, each with the bound that it breaks."""
    for option in schema.get("anyOf", ()):
        yield from beyond(option)
    kind = schema.get("type")
    step = 1 if kind == "integer" else 0.01
    if "maximum" in schema:
        yield schema["maximum"] + step, as_written(schema["maximum"])
    if "minimum" in schema:
        yield schema["minimum"] - step, as_written(schema["minimum"])
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"], as_written(schema["exclusiveMinimum"])
    if schema.get("maxLength", TOO_LARGE_TO_SEND) < TOO_LARGE_TO_SEND:
        yield "x" * (schema["maxLength"] + 1), str(schema["maxLength"])
    if schema.get("maxItems", TOO_LARGE_TO_SEND) < TOO_LARGE_TO_SEND:
        yield [an_item(schema["items"])] * (schema["maxItems"] + 1), str(schema["maxItems"])
    if "maxProperties" in schema:
        item = an_item(schema.get("additionalProperties"))
        yield {str(n): item for n in range(schema["maxProperties"] + 1)}, str(schema["maxProperties"])
    if "items" in schema:
        yield from (([value], bound) for value, bound in beyond(schema["items"]))


def as_written(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def an_item(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return "x"
    if "$ref" in schema:
        return AN_OBJECT[schema["$ref"].rpartition("/")[2]]
    return {"integer": 1, "number": 1.0, "string": "x", "array": [1]}.get(schema.get("type", ""), "x")


def cases() -> list[Case]:
    found = []
    for path, (model, _) in ENDPOINTS.items():
        for field, schema in model.model_json_schema()["properties"].items():
            found += [Case(path, field, value, bound) for value, bound in beyond(schema)]
    return found


CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=[f"{case.path}-{case.field}-{case.bound}" for case in CASES])
async def test_what_is_beyond_a_bound_is_refused_with_the_bound_in_the_message(case):
    app = build_app(FakeEngine(), Settings(max_body_bytes=2**24))
    async with connect(app) as client:
        response = await client.post(case.path, json={**ENDPOINTS[case.path][1], case.field: case.value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].split("[")[0].split(".")[0] == case.field
    assert case.bound in error["message"].replace(",", "")
    assert response.headers["x-should-retry"] == "false"


def test_the_table_is_not_empty_for_any_kind_of_bound():
    fields = {case.field for case in CASES}
    assert {
        "temperature",
        "n",
        "stop",
        "stop_token_ids",
        "bad_words",
        "user",
        "metadata",
        "messages",
    } <= fields
    assert {"prompt", "best_of", "logprobs", "timeout", "priority", "seed", "tokens", "cache_salt"} <= fields


async def test_a_body_for_which_the_parser_finds_no_memory_is_no_fault_of_the_client(client, monkeypatch):
    def without_memory(_: bytes) -> None:
        # The words of orjson 3, seen in a process with a limit on addresses.
        raise orjson.JSONDecodeError("Not enough memory to allocate buffer for parsing", "", 0)

    monkeypatch.setattr(orjson, "loads", without_memory)
    reply = await client.post("/v1/completions", json={"prompt": "x"})
    monkeypatch.undo()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "low_memory")
    assert reply.headers["retry-after"]
