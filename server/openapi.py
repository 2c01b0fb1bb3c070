"""The document at /openapi.json: what each route takes and gives, errors and streams included.

Owns: the documentation of routes that read their bodies themselves, for the sake of speed and of our own
error replies.
Never: validation: the request schemas are those of protocol.py, the models that validate.
"""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.access.auth import OPEN_PATHS
from server.generate.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from server.generate.reply_models import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Detokenization,
    ErrorReplyBody,
    HealthPage,
    LiveRequests,
    Model,
    ModelList,
    Tokenization,
    Version,
)
from server.pooling.pooling_models import Embeddings, Ranking, ScoreList
from server.pooling.pooling_protocol import (
    EMBEDDING_REFUSALS,
    SCORE_REFUSALS,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from server.refusals import CHAT_REFUSALS, COMPLETION_REFUSALS
from server.responses.input_items import MAX_PAGE_ITEMS
from server.responses.response_models import InputItemPage, ResponseDeletion, ResponseEvent, ResponseObject
from server.responses.responses_protocol import RESPONSES_REFUSALS, ResponsesRequest

_REF = "#/components/schemas/{model}"
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReplyBody, "description": "The caller's mistake, or too much work (429)."},
    "5XX": {"model": ErrorReplyBody, "description": "The server's failure, or not ready (503)."},
}
_STREAM_NOTE = (
    "With `stream`: server-sent events, each `data: ` and a chunk; comments keep the connection alive;"
    ' a failure under way is an event `{"error": ...}`; the last event is `data: [DONE]`.'
)

_NAMED_STREAM_NOTE = (
    "With `stream`: server-sent events whose names are their types, `response.created` first, and"
    " `response.completed`, `response.incomplete` or `response.failed` last; comments keep the connection"
    " alive."
)


_PAGE_PARAMETERS = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_ITEMS, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}


def _documentation(
    model: type[BaseModel], *, request: type[BaseModel] | None = None, chunk: type[BaseModel] | None = None
) -> dict[str, Any]:
    """Keyword arguments for the decorator of a route."""
    success: dict[str, Any] = {"model": model, "description": "Success."}
    if chunk is not None:
        success["description"] = _STREAM_NOTE
        success["content"] = {"text/event-stream": {"schema": _event(chunk)}}
    documentation: dict[str, Any] = {"responses": {200: success, **_ERRORS}}
    if request is not None:
        body = {"required": True, "content": {"application/json": {"schema": _reference(request)}}}
        documentation["openapi_extra"] = {"requestBody": body}
    return documentation


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """One server-sent event, as OpenAPI 3.2 describes it: an object of its fields, `data` being a string."""
    json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"oneOf": [_reference(chunk), _reference(ErrorReplyBody)]},
    }
    data = {"oneOf": [{"const": "[DONE]"}, json]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _named_event(payload: type[BaseModel]) -> dict[str, Any]:
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _reference(payload)}
    properties = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "required": ["event", "data"], "properties": properties}


def _of_one(model: type[BaseModel], parameter: str) -> dict[str, Any]:
    """The same for a route whose path names one of many."""
    place = {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
    return {**_documentation(model), "openapi_extra": {"parameters": [place]}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


COMPLETION_DOCUMENTATION = _documentation(Completion, request=CompletionRequest, chunk=Completion)
CHAT_DOCUMENTATION = _documentation(ChatCompletion, request=ChatCompletionRequest, chunk=ChatCompletionChunk)
MODELS_DOCUMENTATION = _documentation(ModelList)
MODEL_DOCUMENTATION = _of_one(Model, "model")
RESPONSES_DOCUMENTATION = _documentation(ResponseObject, request=ResponsesRequest)
RESPONSES_DOCUMENTATION["responses"][200] = {
    "model": ResponseObject,
    "description": _NAMED_STREAM_NOTE,
    "content": {"text/event-stream": {"schema": _named_event(ResponseEvent)}},
}
RESPONSE_DOCUMENTATION = _of_one(ResponseObject, "response_id")
DELETION_DOCUMENTATION = _of_one(ResponseDeletion, "response_id")
INPUT_ITEMS_DOCUMENTATION = _of_one(InputItemPage, "response_id")
INPUT_ITEMS_DOCUMENTATION["openapi_extra"]["parameters"] += [
    {"name": name, "in": "query", "schema": schema} for name, schema in _PAGE_PARAMETERS.items()
]
CANCEL_DOCUMENTATION = _of_one(ResponseObject, "response_id")
# There is no response that could be cancelled, so no success either.
CANCEL_DOCUMENTATION["responses"] = dict(_ERRORS)
TOKENIZE_DOCUMENTATION = _documentation(Tokenization, request=TokenizeRequest)
DETOKENIZE_DOCUMENTATION = _documentation(Detokenization, request=DetokenizeRequest)
EMBEDDING_DOCUMENTATION = _documentation(Embeddings, request=EmbeddingRequest)
SCORE_DOCUMENTATION = _documentation(ScoreList, request=ScoreRequest)
RERANK_DOCUMENTATION = _documentation(Ranking, request=RerankRequest)
VERSION_DOCUMENTATION = _documentation(Version)
ADMIN_DOCUMENTATION = _documentation(LiveRequests)
RESET_DOCUMENTATION: dict[str, Any] = {"responses": {204: {"description": "It is empty."}, **_ERRORS}}
HEALTH_DOCUMENTATION: dict[str, Any] = {
    "responses": {200: {"model": HealthPage}, 503: {"model": HealthPage}},
}
METRICS_DOCUMENTATION: dict[str, Any] = {
    "responses": {200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."}},
}


def document(app: FastAPI, *, needs_key: bool, open_paths: Iterable[str] = OPEN_PATHS) -> dict[str, Any]:
    """Build the whole document; the application keeps it."""
    page = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        routes=app.routes,
    )
    schemas = page.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(_schemas([(CompletionRequest, "validation"), (ChatCompletionRequest, "validation")]))
    schemas.update(_schemas([(ResponsesRequest, "validation"), (ResponseEvent, "serialization")]))
    schemas.update(_schemas([(ChatCompletionChunk, "serialization")]))
    schemas.update(_schemas([(TokenizeRequest, "validation"), (DetokenizeRequest, "validation")]))
    schemas.update(_schemas([(EmbeddingRequest, "validation"), (ScoreRequest, "validation")]))
    schemas.update(_schemas([(RerankRequest, "validation")]))
    _name_refusals(schemas["EmbeddingRequest"], list(EMBEDDING_REFUSALS))
    _name_refusals(schemas["ScoreRequest"], list(SCORE_REFUSALS))
    _name_refusals(schemas["RerankRequest"], list(SCORE_REFUSALS))
    _name_refusals(schemas["CompletionRequest"], list(COMPLETION_REFUSALS))
    _name_refusals(schemas["ChatCompletionRequest"], list(CHAT_REFUSALS))
    _name_refusals(schemas["ResponsesRequest"], list(RESPONSES_REFUSALS))
    if needs_key:
        page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
        for path in open_paths:
            for operation in page["paths"][path].values():
                operation["security"] = []
    return page


def _schemas(models: list[tuple[type[BaseModel], Any]]) -> dict[str, Any]:
    _, definitions = models_json_schema(models, ref_template=_REF)
    found: dict[str, Any] = definitions["$defs"]
    return found


def _name_refusals(schema: dict[str, Any], names: list[str]) -> None:
    listed = ", ".join(f"`{name}`" for name in sorted(names))
    schema["description"] += (
        f"\n\nRefused by name, unless set to a value that asks for nothing: {listed}."
        " Other unknown fields are ignored."
    )
