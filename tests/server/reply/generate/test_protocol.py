"""No field is parsed and ignored: each has an effect, or is refused by name, or is listed as without one."""

import ast
import typing
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

import server
from server.api.chat.protocol import CHAT_REFUSALS, ChatCompletionRequest, ChatMessage, ContentPart
from server.api.chat.tool_protocol import (
    MAX_SCHEMA_BYTES,
    AllowedTools,
    FunctionDefinition,
    NamedTool,
    Tool,
    ToolChoiceObject,
)
from server.api.completions.protocol import COMPLETION_REFUSALS, CompletionRequest
from server.api.operations.tokenization import DetokenizeRequest, TokenizeRequest
from server.reply.generate.engine_requests import _PLAIN
from server.reply.generate.protocol import StreamOptions

READERS = (
    *("reply/generate/calls.py", "reply/generate/engine_requests.py", "reply/generate/answering.py"),
    *("reply/generate/structured_output.py", "api/completions/completions.py", "api/completions/requests.py"),
    *("api/chat/chat.py", "api/chat/template_input.py", "api/chat/turn.py", "api/chat/tool_use.py"),
    *("api/chat/plan.py", "reply/pictures/media_parts.py"),
)
ACCEPTED_WITHOUT_EFFECT = frozenset(
    {"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""They speak to a provider's billing and storage."""


def fields_read() -> set[str]:
    """Attribute names, and names asked for by getattr in a loop, in the modules that read requests."""
    names = set(_PLAIN)
    for module in READERS:
        for node in ast.walk(ast.parse((Path(server.__file__).parent / module).read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
                names |= {name.value for name in node.iter.elts if isinstance(name, ast.Constant)}
    return names


@pytest.mark.parametrize(
    "model",
    [
        *(CompletionRequest, ChatCompletionRequest, ChatMessage, ContentPart, StreamOptions),
        *(Tool, ToolChoiceObject, AllowedTools, NamedTool),
    ],
)
def test_every_declared_field_is_read(model):
    unread = set(model.model_fields) - fields_read()
    expected = (
        ACCEPTED_WITHOUT_EFFECT if issubclass(model, CompletionRequest | ChatCompletionRequest) else set()
    )
    assert unread == expected


@pytest.mark.parametrize(
    ("model", "refused", "documented"),
    [
        (
            CompletionRequest,
            COMPLETION_REFUSALS,
            [
                completion_create_params.CompletionCreateParamsNonStreaming,
                completion_create_params.CompletionCreateParamsStreaming,
            ],
        ),
        (
            ChatCompletionRequest,
            CHAT_REFUSALS,
            [
                chat_create_params.CompletionCreateParamsNonStreaming,
                chat_create_params.CompletionCreateParamsStreaming,
            ],
        ),
    ],
)
def test_every_field_that_openai_documents_is_supported_or_refused_by_name(model, refused, documented):
    names = {name for params in documented for name in typing.get_type_hints(params)}
    assert names - set(model.model_fields) - set(refused) == set()
    assert set(model.model_fields) & set(refused) == set()


def unbounded(schema: dict, where: str) -> list[str]:
    """Places in a schema where a string has no length, a number no range, an array or an object no size."""
    options = schema.get("anyOf", ())
    found = [place for option in options for place in unbounded(option, where)]
    bound = {
        "string": {"maxLength"},
        "integer": {"maximum", "exclusiveMaximum"},
        "number": {"maximum", "exclusiveMaximum"},
        "array": {"maxItems"},
        "object": {"maxProperties"},
    }.get(schema.get("type"), set())
    if bound and not bound & set(schema) and not {"enum", "const"} & set(schema):
        found.append(where)
    if "items" in schema:
        found += unbounded(schema["items"], f"{where}[]")
    return found


@pytest.mark.parametrize(
    "model", [CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest]
)
def test_every_field_is_bounded(model):
    document = model.model_json_schema()
    fields = dict(document["properties"])
    for title, definition in document.get("$defs", {}).items():
        fields |= {f"{title}.{name}": schema for name, schema in definition["properties"].items()}
    places = {place for name, schema in fields.items() for place in unbounded(schema, name)}
    # Token ids are compared with the vocabulary; the other two are refused whatever they hold.
    assert places <= {"prompt[]", "prompt[][]", "tokens[]", "ChatMessage.audio", "ChatMessage.function_call"}


def test_the_schema_of_a_tool_is_bounded():
    room = MAX_SCHEMA_BYTES - len('{"title":""}')
    FunctionDefinition(name="f", parameters={"title": "x" * room})
    with pytest.raises(ValidationError, match=f"at most {MAX_SCHEMA_BYTES} bytes"):
        FunctionDefinition(name="f", parameters={"title": "x" * (room + 1)})
