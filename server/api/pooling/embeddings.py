"""POST /v1/embeddings.

Owns: the way from body to reply. Each step is in a module of its own.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.pooling.models import Embeddings
from server.api.pooling.protocol import EMBEDDING_REFUSALS, EmbeddingRequest
from server.api.pooling.replies import embeddings_reply
from server.api.pooling.requests import (
    check_embeds,
    names_of,
    pooling_requests,
    text_cut,
    tokenize_inputs,
)
from server.edge.http.disconnect import while_connected
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import Endpoint, documentation
from server.reply.generate.answering import new_head, new_reply_id
from server.reply.generate.calls import read_call

_PATH = "/v1/embeddings"

router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    requests={EmbeddingRequest: EMBEDDING_REFUSALS},
    batch_paths=frozenset({_PATH}),
    operations={_PATH: "embeddings"},
)


@router.post(_PATH, **documentation(Embeddings, request=EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """Make one vector of each input."""
    engine = edge_of(request).engine
    reply_id = new_reply_id("embd")
    body, origin = await read_call(request, EmbeddingRequest, EMBEDDING_REFUSALS, reply_id=reply_id)
    info = engine.info
    check_embeds(body, info)
    texts = await tokenize_inputs(engine, body.input, text_cut(body, info, param="input"))
    requests = pooling_requests(body, texts, info, origin, names=names_of("input", len(texts)))
    outputs = await while_connected(request.receive, engine.pool_all(requests))
    num_tokens = sum(len(text.token_ids) for text in texts)
    return await embeddings_reply(
        new_head(origin, info), outputs, body.encoding_format or "float", num_tokens=num_tokens
    )
