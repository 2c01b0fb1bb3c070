"""POST /api/chat and /api/generate."""

import secrets
import time
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from server.api.chat.replies import OnlyChoice
from server.api.chat.turn import prepare_fitting
from server.api.completions.requests import fitting_completion
from server.api.ollama.input import chat_request_of, completion_request_of, in_ollamas_words
from server.api.ollama.lines import LINES, LineShape, LineStream, error_body
from server.api.ollama.model_routes import documented, keep_idle, own_place, router
from server.api.ollama.models import OllamaReply
from server.api.ollama.protocol import (
    PROMPT_REFUSALS,
    TURN_REFUSALS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import Endpoint, json_reply, reference
from server.reply.generate.answering import new_head, whole
from server.reply.generate.calls import Origin, read_call
from server.reply.generate.replies import Gathered, ReplyPlan
from server.reply.generate.sse import EventStream

_CHAT, _GENERATE = "/api/chat", "/api/generate"
_STREAM_NOTE = "Unless `stream` is false: lines of JSON, each of this shape; the last one has `done`: true."


def _documentation(request: type[BaseModel]) -> dict[str, Any]:
    found = documented(OllamaReply, request=request)
    success = found["responses"][200]
    success["description"] = _STREAM_NOTE
    success["content"]["application/x-ndjson"] = {"schema": reference(OllamaReply)}
    return found


ENDPOINT = Endpoint(
    router=router,
    requests={
        OllamaChatRequest: TURN_REFUSALS,
        OllamaGenerateRequest: PROMPT_REFUSALS,
        OllamaShowRequest: (),
    },
    operations={_CHAT: "chat", _GENERATE: "generate_content"},
    error_shapes={"/api": error_body},
)


@router.post(_CHAT, **_documentation(OllamaChatRequest))
async def chat_in_lines(request: Request) -> Response:
    """Answer a conversation in Ollama's words: a line of JSON for each piece, unless `stream` is false."""
    body, origin = await read_call(request, OllamaChatRequest, TURN_REFUSALS, reply_id=_reply_id())
    return await _answer(request, body, origin)


@router.post(_GENERATE, **_documentation(OllamaGenerateRequest))
async def generate_in_lines(request: Request) -> Response:
    """Answer one prompt, by the chat template unless it is raw, or has a suffix."""
    body, origin = await read_call(request, OllamaGenerateRequest, PROMPT_REFUSALS, reply_id=_reply_id())
    return await _answer(request, body, origin)


async def _answer(
    request: Request, body: OllamaChatRequest | OllamaGenerateRequest, origin: Origin
) -> Response:
    keep_idle(request, body.keep_alive)
    edge = edge_of(request)
    names = edge.engine.names
    shape = LineShape(model=body.model or names.served[0], is_chat=isinstance(body, OllamaChatRequest))
    empty = {**shape.line({"content": ""}, time.time()), "done": True}
    if edge.place is not None and not body.needs_model:
        if (place := own_place(request)) is not None:
            place.leave()
        return json_reply({**empty, "done_reason": "load" if place is None else "unload"})
    info = edge.engine.info
    if body.is_empty:  # clients ask so for the model to be loaded
        return json_reply({**empty, "done_reason": "load"})
    turn, note = None, origin.note
    with in_ollamas_words(body):
        if isinstance(body, OllamaGenerateRequest) and (body.raw or body.suffix):
            note(["think"] if body.think is not None else [])
            made = await fitting_completion(edge.engine, completion_request_of(body, info), origin)
        else:
            # The only switch of a chat that there is here.
            origin = replace(origin, note=lambda names: note("think" for _ in names))
            turn = await prepare_fitting(edge, chat_request_of(body, info), origin)
            made = turn.request
    plan = ReplyPlan(head=new_head(origin, info), num_prompt_tokens=(len(made.prompt_token_ids),))
    choice = OnlyChoice(plan) if turn is None else OnlyChoice(plan, turn.reading)
    stream = LineStream(shape, choice, clock=time.monotonic, unix_time_s=time.time)
    outputs = edge.engine.generate_all([made])
    if body.stream is not False:
        return EventStream(outputs, stream, edge, framing=LINES)
    return await whole(request, outputs, Gathered(stream, lambda: stream.reply))


def _reply_id() -> str:
    return f"ollama-{secrets.token_hex(12)}"
