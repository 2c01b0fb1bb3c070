"""POST /v1/embeddings, and /v1/score and /v1/rerank: scores of pairs of texts.

Owns: the way from body to reply, and the shapes of replies, for /openapi.json only; tests/server holds every
real reply against them. A cross-encoder reads both texts of a pair at once; with embeddings
a score is the cosine of two vectors. Also the other paths at which clients of vLLM, Jina and Cohere ask.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestRejected
from engine.types import PoolingTask
from server.api.pooling.protocol import (
    EMBEDDING_REFUSALS,
    SCORE_REFUSALS,
    EmbeddingRequest,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
)
from server.api.pooling.replies import embeddings_reply, ranking_reply, scores_reply
from server.api.pooling.requests import (
    check_embeds,
    names_of,
    pooling_of,
    pooling_requests,
    text_cut,
    tokenize_inputs,
    tokenize_pairs,
)
from server.edge.http.disconnect import while_connected
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import Endpoint, ReplyModel, documentation
from server.reply.generate.answering import new_head, new_reply_id
from server.reply.generate.calls import Origin, read_call


class PoolingUsage(ReplyModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(ReplyModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Base64 of float32 numbers, little-endian, if that was asked for."""


class Embeddings(ReplyModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class Score(ReplyModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(ReplyModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedText(ReplyModel):
    text: str


class RankedDocument(ReplyModel):
    index: int
    """Among the documents of the request."""
    relevance_score: float
    document: RankedText | None = None


class Ranking(ReplyModel):
    id: str
    model: str
    results: list[RankedDocument]
    """Best first."""
    usage: PoolingUsage


_EMBEDDINGS = "/v1/embeddings"

router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    requests={
        EmbeddingRequest: EMBEDDING_REFUSALS,
        ScoreRequest: SCORE_REFUSALS,
        RerankRequest: SCORE_REFUSALS,
    },
    batch_paths=frozenset({_EMBEDDINGS}),
    operations={_EMBEDDINGS: "embeddings"},
)


class Sides(NamedTuple):
    """Texts to compare: one with each of `right`, or as many as in `right`, each with its own."""

    left: Sequence[str]
    right: Sequence[str]
    left_param: str
    right_param: str


class Scored(NamedTuple):
    scores: list[float]
    num_tokens: int


@router.post(_EMBEDDINGS, **documentation(Embeddings, request=EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """Make one vector of each input."""
    reply_id = new_reply_id("embd")
    body, origin = await read_call(request, EmbeddingRequest, EMBEDDING_REFUSALS, reply_id=reply_id)
    outputs, num_tokens = await embed(request, body, origin)
    head = new_head(origin, edge_of(request).engine.info)
    return await embeddings_reply(head, outputs, body.encoding_format or "float", num_tokens=num_tokens)


async def embed(request: Request, body: EmbeddingRequest, origin: Origin) -> tuple[Sequence[bytes], int]:
    """Compute one vector of each input; return the number of tokens, too. Raises the engine's errors."""
    engine = edge_of(request).engine
    info = engine.info
    check_embeds(body, info)
    texts = await tokenize_inputs(engine, body.input, text_cut(body, info, param="input"))
    requests = pooling_requests(body, texts, info, origin, names=names_of("input", len(texts)))
    outputs = await while_connected(request.receive, engine.pool_all(requests))
    return outputs, sum(len(text.token_ids) for text in texts)


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", **documentation(ScoreList, request=ScoreRequest))
async def create_scores(request: Request) -> Response:
    """Score one text against several, or pairs of texts."""
    reply_id = new_reply_id("score")
    body, origin = await read_call(request, ScoreRequest, SCORE_REFUSALS, reply_id=reply_id)
    if len(body.text_1) not in (1, len(body.text_2)):
        raise RequestRejected(
            f"text_1 must be one text or as many as text_2, {len(body.text_2)}, not {len(body.text_1)}",
            param="text_1",
        )
    scored = await _score(request, body, Sides(body.text_1, body.text_2, "text_1", "text_2"), origin)
    head = new_head(origin, edge_of(request).engine.info)
    return scores_reply(head, scored.scores, num_tokens=scored.num_tokens)


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", **documentation(Ranking, request=RerankRequest))
async def create_ranking(request: Request) -> Response:
    """Order documents by how well they answer a query."""
    reply_id = new_reply_id("rerank")
    body, origin = await read_call(request, RerankRequest, SCORE_REFUSALS, reply_id=reply_id)
    scored = await _score(request, body, Sides([body.query], body.documents, "query", "documents"), origin)
    has_documents = body.return_documents is not False
    return ranking_reply(
        new_head(origin, edge_of(request).engine.info),
        scored.scores,
        body.documents if has_documents else [None] * len(body.documents),
        most=len(body.documents) if body.top_n is None else body.top_n,
        num_tokens=scored.num_tokens,
    )


async def _score(request: Request, body: PoolingFields, sides: Sides, origin: Origin) -> Scored:
    """Compute one score for each text on the right. Raises the engine's errors, and ClientDisconnect."""
    from server.api.pooling.vectors import cosines, rows_of  # not at the top: it brings numpy

    engine = edge_of(request).engine
    info = engine.info
    is_cross_encoder = pooling_of(info).task is PoolingTask.SCORE
    cut = text_cut(body, info, param=sides.right_param)
    names = names_of(sides.right_param, len(sides.right))
    if is_cross_encoder:
        left = [*sides.left] * (len(sides.right) if len(sides.left) == 1 else 1)
        texts = await tokenize_pairs(engine, list(zip(left, sides.right, strict=True)), cut)
    else:
        texts = await tokenize_inputs(engine, (*sides.left, *sides.right), cut)
        names = names_of(sides.left_param, len(sides.left)) + names
    requests = pooling_requests(body, texts, info, origin, names=names)
    outputs = await while_connected(request.receive, engine.pool_all(requests))
    vectors = rows_of(outputs)
    if is_cross_encoder:
        scores = vectors[:, 0]
    else:
        scores = cosines(vectors[: len(sides.left)], vectors[len(sides.left) :])
    return Scored(
        scores=[float(score) for score in scores],
        num_tokens=sum(len(text.token_ids) for text in texts),
    )
