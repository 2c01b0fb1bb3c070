"""Shapes of replies with vectors and scores, for /openapi.json only.

Owns: the documentation of replies; tests/server hold every real reply against it.
Never: imported by code that builds replies.
"""

from typing import Literal

from server.edge.http.endpoint import ReplyModel


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
