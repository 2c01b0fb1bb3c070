"""POST /v1/messages and /v1/messages/count_tokens, and HEAD /, with which clients look for a server.

Owns: the way from body to reply.
Never: rendering or generating: that is the chat path, step for step.
"""

import secrets
from typing import Any

import orjson
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import ContextLengthExceeded
from server.api.anthropic.errors import error_body
from server.api.anthropic.events import AnthropicFraming, MessageStream, WholeMessage
from server.api.anthropic.input import chat_request_of, in_their_words
from server.api.anthropic.models import AnthropicErrorBody, AnthropicEvent, AnthropicMessage, TokenCount
from server.api.anthropic.protocol import MESSAGES_REFUSALS, CountTokensRequest, MessagesRequest
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.replies import ChatStream
from server.api.chat.turn import ChatTurn, prepare_turn, prompt_of
from server.edge.http.edge import Edge, edge_of
from server.edge.http.endpoint import Endpoint, documentation, errors_as, reference
from server.edge.http.json_body import read_request
from server.reply.generate.answering import new_head, whole
from server.reply.generate.calls import Origin, read_call
from server.reply.generate.replies import ReplyPlan, UsageReport
from server.reply.generate.sse import EventStream

_PATH = "/v1/messages"
_COUNT_PATH = "/v1/messages/count_tokens"
_STREAM_NOTE = (
    "With `stream`: server-sent events whose names are their types, `message_start` first, `message_stop`"
    " or `error` last; comments keep the connection alive."
)


def _documentation(
    reply: type[BaseModel], request: type[BaseModel], *, event: type[BaseModel] | None = None
) -> dict[str, Any]:
    found = documentation(reply, request=request)
    found["responses"] |= errors_as(AnthropicErrorBody)
    if event is not None:
        payload = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": reference(event),
        }
        properties = {"event": {"type": "string"}, "data": payload}
        schema = {"type": "object", "required": ["event", "data"], "properties": properties}
        success = found["responses"][200]
        success["description"] = _STREAM_NOTE
        success["content"]["text/event-stream"] = {"schema": schema}
    return found


router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    requests={MessagesRequest: MESSAGES_REFUSALS, CountTokensRequest: MESSAGES_REFUSALS},
    events=(AnthropicEvent,),
    operations={_PATH: "chat"},
    error_shapes={_PATH: error_body, _COUNT_PATH: error_body},
)


@router.head("/", include_in_schema=False)
async def is_there() -> Response:
    """Say that a server is here."""
    return Response()


@router.post(_PATH, **_documentation(AnthropicMessage, MessagesRequest, event=AnthropicEvent))
async def create_message(request: Request) -> Response:
    """Answer a conversation in Anthropic's words."""
    edge = edge_of(request)
    reply_id = f"msg_{secrets.token_hex(12)}"
    body, origin = await read_call(request, MessagesRequest, MESSAGES_REFUSALS, reply_id=reply_id)
    turn = await _prepare(edge, chat_request_of(body), origin)
    head = new_head(origin, edge.engine.info)
    plan = ReplyPlan(
        head=head,
        num_prompt_tokens=(len(turn.prompt_ids),),
        n=1,
        has_logprobs=False,
        usage=UsageReport(at_end=True),
    )
    stream = MessageStream(reply_id, head.model, len(turn.prompt_ids), ChatStream(plan, turn.reading))
    outputs = edge.engine.generate_all([turn.request])
    if body.stream:
        return EventStream(outputs, stream, edge, framing=AnthropicFraming())
    return await whole(request, outputs, WholeMessage(stream))


@router.post(_COUNT_PATH, **_documentation(TokenCount, CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """The number of tokens of the prompt that the same body would make."""
    body = await read_request(request, CountTokensRequest, MESSAGES_REFUSALS, from_headers={})
    with in_their_words():
        token_ids = await prompt_of(edge_of(request), chat_request_of(body))
    return Response(orjson.dumps({"input_tokens": len(token_ids)}), media_type="application/json")


async def _prepare(edge: Edge, chat: ChatCompletionRequest, origin: Origin) -> ChatTurn:
    """Prepare the turn. Agents ask for more tokens than many a context window has: they get what is left."""
    with in_their_words():
        try:
            return await prepare_turn(edge, chat, origin)
        except ContextLengthExceeded as error:
            if error.param != "max_completion_tokens":
                raise
        return await prepare_turn(edge, chat.model_copy(update={"max_completion_tokens": None}), origin)
