"""Replies with vectors, scores and rankings.

Owns: their shapes, and how float32 numbers become JSON or base64, without holding the event loop for long.
"""

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Any, Literal

import orjson
from starlette.responses import Response

from server.edge.http.endpoint import json_reply
from server.reply.generate.long_reply import reply_of
from server.reply.generate.replies import ReplyHead

_VECTORS_AT_ONCE = 64

Format = Literal["float", "base64"]


async def embeddings_reply(
    head: ReplyHead, outputs: Sequence[bytes], encoding: Format, *, num_tokens: int
) -> Response:
    """OpenAI's list of embeddings."""

    def item_of(index: int, vector: Any) -> dict[str, Any]:
        if encoding == "base64":
            vector = base64.b64encode(outputs[index]).decode("ascii")
        return {"object": "embedding", "index": index, "embedding": vector}

    pieces = await written_vectors(outputs, item_of)
    after = {"model": head.model, "usage": _usage(num_tokens)}
    return reply_of([b'{"object":"list","data":[', *pieces, b"]," + orjson.dumps(after)[1:]])


async def written_vectors(outputs: Sequence[bytes], item_of: Callable[[int, Any], Any]) -> list[bytes]:
    """Items of a list of JSON with the commas between them, made of each vector and its place."""
    from server.api.pooling.vectors import vectors_of  # not at the top: it brings numpy

    pieces = []
    for index, vector in enumerate(vectors_of(outputs)):
        if index % _VECTORS_AT_ONCE == 0:
            await asyncio.sleep(0)
        item = orjson.dumps(item_of(index, vector), option=orjson.OPT_SERIALIZE_NUMPY)
        pieces.append((b"," if index else b"") + item)
    return pieces


def scores_reply(head: ReplyHead, scores: Sequence[float], *, num_tokens: int) -> Response:
    """Scores in the order of the texts, as vLLM lists them."""
    return json_reply(
        {
            "id": head.id,
            "object": "list",
            "created": head.created_s,
            "model": head.model,
            "data": [
                {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
            ],
            "usage": _usage(num_tokens),
        }
    )


def ranking_reply(
    head: ReplyHead, scores: Sequence[float], documents: Sequence[str | None], *, most: int, num_tokens: int
) -> Response:
    """Jina's and Cohere's list of results, best first; a document of None is left out."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:most]
    results = []
    for index in order:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if documents[index] is not None:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return json_reply({"id": head.id, "model": head.model, "results": results, "usage": _usage(num_tokens)})


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
