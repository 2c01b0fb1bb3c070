"""Engine outputs to an HTTP response, for all endpoints that generate."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from functools import lru_cache
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from engine.types import ModelInfo
from engine.version import VERSION
from server.edge.http.disconnect import while_connected
from server.edge.http.edge import NumberedOutputs, edge_of
from server.reply.generate.calls import Origin
from server.reply.generate.long_reply import reply_of
from server.reply.generate.protocol import GenerationFields
from server.reply.generate.replies import INLINE_PROMPT_LOGPROBS, FullReply, ReplyHead, UsageReport
from server.reply.generate.wire_logprobs import TokenNames

_INLINE_LOGPROBS = 256
"""A reply with more tokens with log-probabilities is made choice by choice."""
_LOAD_FORMAT_HEADER = "endpoint-load-metrics-format"
_LOAD_HEADER = "endpoint-load-metrics"


def new_reply_id(kind: str) -> str:
    """A random id, `kind` being OpenAI's prefix for it. The client's own request id is not unique."""
    return f"{kind}-{secrets.token_hex(16)}"


def new_head(origin: Origin, info: ModelInfo) -> ReplyHead:
    return ReplyHead(
        id=origin.reply_id,
        created_s=int(time.time()),
        model=origin.model if origin.model in info.variants else info.served_names[0],
        system_fingerprint=_fingerprint(info.model_type, info.num_parameters, info.dtype, info.device),
    )


@lru_cache(maxsize=16)
def _fingerprint(*computed_by: str | int) -> str:
    return "fp_" + hashlib.sha256(repr((VERSION, *computed_by)).encode()).hexdigest()[:12]


def usage_report(body: GenerationFields) -> UsageReport:
    options = body.stream_options
    if options is None:
        return UsageReport()
    is_refused = options.include_usage is False  # then it is nowhere, as with vLLM
    return UsageReport(
        at_end=bool(options.include_usage),
        in_every_chunk=bool(options.continuous_usage_stats) and not is_refused,
    )


def token_names(body: GenerationFields) -> TokenNames:
    return TokenNames.ID if body.return_tokens_as_token_ids else TokenNames.TEXT


async def whole(request: Request, outputs: NumberedOutputs, reply: FullReply) -> Response:
    """Collect all outputs into one reply. Raises the engine's errors, and ClientDisconnect."""
    pieces = await while_connected(request.receive, _collect(outputs, reply))
    headers = load_headers(request)
    return reply_of(pieces, headers)


def load_headers(request: Request) -> dict[str, str]:
    """The engine's load for a balancer, if the request asks for it in a form that is known: TEXT or JSON.

    Source: Open Request Cost Aggregation (ORCA), with the names of vLLM's metrics.
    """
    form = request.headers.get(_LOAD_FORMAT_HEADER)
    if form is None:
        return {}
    load = edge_of(request).engine.load()
    metrics: dict[str, float] = {
        "kv_cache_usage_perc": round(load.kv_cache_usage, 4),
        "num_requests_waiting": load.num_waiting,
    }
    match form.strip().upper():
        case "TEXT":
            named = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
            return {_LOAD_HEADER: f"TEXT {named}"}
        case "JSON":
            return {_LOAD_HEADER: "JSON " + orjson.dumps({"named_metrics": metrics}).decode()}
    return {}


async def _collect(outputs: NumberedOutputs, reply: FullReply) -> list[bytes]:
    num_logprobs = num_prompt_logprobs = 0
    async with aclosing(outputs):
        async for prompt_index, output in outputs:
            num_logprobs += len(output.logprobs)
            num_prompt_logprobs += len(output.prompt_logprobs)
            reply.update(prompt_index, output)
    if num_prompt_logprobs > INLINE_PROMPT_LOGPROBS:
        return await asyncio.to_thread(lambda: list(_pieces(reply.finish())))
    if num_logprobs <= _INLINE_LOGPROBS:
        return [orjson.dumps(reply.finish())]
    pieces = []
    for piece in _pieces(reply.finish()):
        pieces.append(piece)
        await asyncio.sleep(0)  # other tasks have their turn
    return pieces


def _pieces(reply: Mapping[str, Any]) -> Iterator[bytes]:
    """Divide the JSON of a reply so that each choice is a piece."""
    names = list(reply)
    if "choices" not in reply:
        yield orjson.dumps(reply)
        return
    place = names.index("choices")
    before, after = ({name: reply[name] for name in part} for part in (names[:place], names[place + 1 :]))
    yield orjson.dumps(before)[:-1] + (b"," if before else b"") + b'"choices":['
    for number, choice in enumerate(reply["choices"]):
        yield (b"," if number else b"") + orjson.dumps(choice)
    yield b"]" + (b"," if after else b"") + orjson.dumps(after)[1:]
