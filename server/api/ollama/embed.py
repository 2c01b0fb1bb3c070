"""POST /api/embed and /api/embeddings: vectors in Ollama's words, of a model that makes embeddings."""

import time
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from server.api.ollama.input import served_name
from server.api.ollama.model_routes import documented, keep_idle
from server.api.ollama.protocol import KeepAlive
from server.api.pooling.endpoints import embed
from server.api.pooling.protocol import MAX_INPUTS, EmbeddingRequest
from server.api.pooling.replies import written_vectors
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import Endpoint, ReplyModel
from server.edge.http.json_body import built
from server.edge.wire_model import shown_as
from server.reply.generate.answering import new_reply_id
from server.reply.generate.calls import Origin, read_call
from server.reply.generate.long_reply import reply_of
from server.reply.generate.protocol import INT32_MAX, ServiceFields, Text

_AS_TEXTS = BeforeValidator(
    lambda value: [value] * bool(value) if isinstance(value, str) else value,
    json_schema_input_type=Text | Annotated[list[Text], Field(max_length=MAX_INPUTS)],
)


class _EmbedFields(ServiceFields):
    options: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Without effect: they set up Ollama's own engine."""
    keep_alive: KeepAlive | None = None
    """Time for which a model that comes and goes stays idle, at most as long as its entry says."""


class OllamaEmbedRequest(_EmbedFields):
    """The body of POST /api/embed."""

    model_config = shown_as(input=["A yard of tokens.", "A crane."])

    input: Annotated[list[Text], Field(max_length=MAX_INPUTS, fail_fast=True), _AS_TEXTS] | None = None
    """Absent or empty: the reply says that the model is loaded."""
    truncate: bool | None = None
    """Off: a text that is longer than the context window is refused; else its end is cut off."""
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None


class OllamaEmbeddingsRequest(_EmbedFields):
    """The body of POST /api/embeddings, the older form: one text."""

    model_config = shown_as(prompt="A yard of tokens.")

    prompt: Text | None = None


class OllamaVectors(ReplyModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(ReplyModel):
    embedding: list[float]


_EMBED, _EMBEDDINGS = "/api/embed", "/api/embeddings"

router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    requests={OllamaEmbedRequest: (), OllamaEmbeddingsRequest: ()},
    operations=dict.fromkeys((_EMBED, _EMBEDDINGS), "embeddings"),
)


@router.post(_EMBED, **documented(OllamaVectors, request=OllamaEmbedRequest))
async def embed_in_ollamas_words(request: Request) -> Response:
    """Make one vector of each text."""
    began_s = time.monotonic()
    body, origin = await read_call(request, OllamaEmbedRequest, {}, reply_id=new_reply_id("ollama"))
    cut = None if body.truncate is False else -1
    fields = {"input": body.input, "dimensions": body.dimensions, "truncate_prompt_tokens": cut}
    pieces, num_tokens = await _vectors(request, body, fields, origin)
    after = {
        "model": body.model or edge_of(request).engine.info.served_names[0],
        "total_duration": int((time.monotonic() - began_s) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return reply_of([b'{"embeddings":[', *pieces, b"]," + orjson.dumps(after)[1:]])


@router.post(_EMBEDDINGS, **documented(OllamaVector, request=OllamaEmbeddingsRequest))
async def embed_one_in_ollamas_words(request: Request) -> Response:
    """Make a vector of one text."""
    body, origin = await read_call(request, OllamaEmbeddingsRequest, {}, reply_id=new_reply_id("ollama"))
    fields = {"input": body.prompt, "truncate_prompt_tokens": -1}
    pieces, _ = await _vectors(request, body, fields, origin)
    return reply_of([b'{"embedding":', *(pieces or [b"[]"]), b"}"])


async def _vectors(
    request: Request, body: _EmbedFields, fields: dict[str, Any], origin: Origin
) -> tuple[list[bytes], int]:
    """Vectors as JSON, between commas, and the number of tokens. Raises RequestRejected, WrongTask."""
    keep_idle(request, body.keep_alive)
    name = served_name(body.model, edge_of(request).engine.info)
    if not fields["input"]:
        return [], 0
    passed_on = {each: getattr(body, each) for each in ServiceFields.model_fields}
    asked = built(EmbeddingRequest, {**passed_on, **fields, "model": name})
    outputs, num_tokens = await embed(request, asked, origin)
    return await written_vectors(outputs, lambda _, vector: vector), num_tokens
