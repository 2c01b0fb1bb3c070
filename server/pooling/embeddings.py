"""POST /v1/embeddings.

Owns: the order of the steps. Each step lives elsewhere.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.generate.answering import new_head, new_origin
from server.generate.early_refusal import read_if_room
from server.http.disconnect import while_connected
from server.http.edge import edge_of
from server.openapi import EMBEDDING_DOCUMENTATION
from server.pooling.pooling_protocol import EMBEDDING_REFUSALS, EmbeddingRequest
from server.pooling.pooling_replies import embeddings_reply
from server.pooling.pooling_requests import (
    check_embeds,
    names_of,
    pooling_requests,
    text_cut,
    tokenize_inputs,
)

router = APIRouter()


@router.post("/v1/embeddings", **EMBEDDING_DOCUMENTATION)
async def create_embeddings(request: Request) -> Response:
    """Make one vector of each input."""
    engine = edge_of(request).engine
    body = await read_if_room(request, EmbeddingRequest, EMBEDDING_REFUSALS)
    info = engine.info
    check_embeds(body, info)
    texts = await tokenize_inputs(engine, body.input, text_cut(body, info, param="input"))
    origin = new_origin("embd", request)
    requests = pooling_requests(body, texts, info, origin, names=names_of("input", len(texts)))
    outputs = await while_connected(request.receive, engine.pool_all(requests))
    num_tokens = sum(len(text.token_ids) for text in texts)
    return await embeddings_reply(
        new_head(origin, info), outputs, body.encoding_format or "float", num_tokens=num_tokens
    )
