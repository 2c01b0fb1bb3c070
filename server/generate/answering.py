"""From engine outputs to an HTTP response, whichever endpoint asked.

Owns: ids and times of replies, the choice between a stream and a whole reply.
Never: shapes (chat_replies.py, completion_replies.py), framing (sse.py).
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from importlib.metadata import version

import orjson
from starlette.requests import Request
from starlette.responses import Response

from engine.types import GenerationRequest, ModelInfo
from server.access.auth import KEY_NAME, key_of
from server.generate.protocol import GenerationFields
from server.generate.replies import INLINE_PROMPT_LOGPROBS, FullReply, ReplyHead, StreamReply, UsageReport
from server.generate.sse import EventStream
from server.generate.translate import Origin
from server.generate.wire_logprobs import TokenNames
from server.http.disconnect import while_connected
from server.http.edge import Edge, NumberedOutputs, edge_of
from server.http.header_fields import tenant_from_headers
from server.observe.request_ids import journal_of

VERSION = version("tokenyard")


def new_origin(kind: str, request: Request) -> Origin:
    """Draw a reply id, `kind` being OpenAI's prefix for it. The client's own request id is not unique.

    Raises RequestRejected.
    """
    # With keys, the key is the tenant: who sends another name in a header does not get another share.
    tenant: str | None = request.scope.get(KEY_NAME) or tenant_from_headers(request.headers)
    journal = journal_of(request.scope)
    journal.reply_id = f"{kind}-{secrets.token_hex(16)}"
    journal.tenant = tenant or ""
    return Origin(
        reply_id=journal.reply_id,
        journal=journal,
        draw_seed=lambda: secrets.randbits(64),
        tenant=tenant,
        key=key_of(request.scope),
    )


def new_head(origin: Origin, info: ModelInfo) -> ReplyHead:
    return ReplyHead(
        id=origin.reply_id,
        created_s=int(time.time()),
        model=info.served_names[0],
        system_fingerprint=_fingerprint(info),
    )


def _fingerprint(info: ModelInfo) -> str:
    computed_by = (VERSION, info.model_type, info.num_parameters, info.dtype, info.device)
    return "fp_" + hashlib.sha256(repr(computed_by).encode()).hexdigest()[:12]


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


def start(edge: Edge, requests: Sequence[GenerationRequest]) -> NumberedOutputs:
    """Nothing runs until the first output is asked for."""
    return edge.engine.generate_all(requests)


def stream(request: Request, outputs: NumberedOutputs, reply: StreamReply) -> Response:
    return EventStream(outputs, reply, edge_of(request))


async def whole(request: Request, outputs: NumberedOutputs, reply: FullReply) -> Response:
    """Raises what the engine raises, and ClientDisconnect."""
    body = await while_connected(request.receive, _collect(outputs, reply))
    return Response(body, media_type="application/json")


async def _collect(outputs: NumberedOutputs, reply: FullReply) -> bytes:
    num_prompt_logprobs = 0
    async with aclosing(outputs):
        async for prompt_index, output in outputs:
            num_prompt_logprobs += len(output.prompt_logprobs)
            reply.update(prompt_index, output)
    if num_prompt_logprobs > INLINE_PROMPT_LOGPROBS:
        return await asyncio.to_thread(lambda: orjson.dumps(reply.finish()))
    return orjson.dumps(reply.finish())
