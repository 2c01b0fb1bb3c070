"""POST /v1/messages and /v1/messages/count_tokens, and HEAD /, with which clients look for a server."""

import secrets
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from server.api.anthropic.events import FRAMING, MessageStream, error_body
from server.api.anthropic.input import chat_request_of, ignored_names, in_their_words
from server.api.anthropic.protocol import MESSAGES_REFUSALS, CountTokensRequest, MessagesRequest
from server.api.chat.replies import OnlyChoice
from server.api.chat.turn import prepare_fitting, prompt_of
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import (
    Endpoint,
    ReplyModel,
    add_named_events,
    documentation,
    json_reply,
)
from server.edge.http.ignored import note_ignored
from server.edge.http.json_body import read_request
from server.reply.generate.answering import new_head, whole
from server.reply.generate.calls import read_call
from server.reply.generate.replies import Gathered, ReplyPlan
from server.reply.generate.sse import EventStream

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicText(ReplyModel):
    type: Literal["text"]
    text: str


class AnthropicThoughts(ReplyModel):
    type: Literal["thinking"]
    thinking: str
    signature: str
    """Always empty."""


class AnthropicToolUse(ReplyModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(ReplyModel):
    input_tokens: int
    """Prompt tokens that were in no cache, less those of the next field."""
    cache_creation_input_tokens: int
    """Tokens that later prompts find, if any block was marked by `cache_control`."""
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(ReplyModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicText | AnthropicThoughts | AnthropicToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(ReplyModel):
    """One event; the fields depend on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: AnthropicMessage | None = None
    index: int | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: AnthropicUsage | None = None
    error: dict[str, str] | None = None


class AnthropicErrorDetail(ReplyModel):
    type: str
    message: str


class AnthropicErrorBody(ReplyModel):
    type: Literal["error"]
    error: AnthropicErrorDetail


class TokenCount(ReplyModel):
    input_tokens: int


_PATH = "/v1/messages"
_COUNT_PATH = "/v1/messages/count_tokens"
_STREAM_NOTE = "`message_start` first, `message_stop` or `error` last; comments keep the connection alive."


def _documentation(
    reply: type[BaseModel], request: type[BaseModel], *, event: type[BaseModel] | None = None
) -> dict[str, Any]:
    found = documentation(reply, request=request, errors=AnthropicErrorBody)
    if event is not None:
        add_named_events(found, event, _STREAM_NOTE)
    return found


router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    requests={MessagesRequest: MESSAGES_REFUSALS, CountTokensRequest: MESSAGES_REFUSALS},
    events=(AnthropicEvent,),
    operations={_PATH: "chat"},
    error_shapes={_PATH: error_body},
)


@router.head("/", include_in_schema=False)
async def is_there() -> Response:
    """Say that a server is here."""
    return Response()


@router.post(_PATH, **_documentation(AnthropicMessage, MessagesRequest, event=AnthropicEvent))
async def create_message(request: Request) -> Response:
    """Answer a conversation in Anthropic's words."""
    reply_id = f"msg_{secrets.token_hex(12)}"
    body, origin = await read_call(request, MessagesRequest, MESSAGES_REFUSALS, reply_id=reply_id)
    edge = edge_of(request)
    note_ignored(request, ignored_names(body))
    chat = chat_request_of(body)
    with in_their_words(body):
        turn = await prepare_fitting(edge, chat, origin)
    head = new_head(origin, edge.engine.info)
    num_tokens = len(turn.prompt_ids)
    plan = ReplyPlan(head=head, num_prompt_tokens=(num_tokens,))
    choice = OnlyChoice(plan, turn.reading)
    stream = MessageStream(reply_id, head.model, num_tokens, choice, is_marked=turn.is_marked)
    outputs = edge.engine.generate_all([turn.request], is_read_whole=not body.stream)
    if body.stream:
        return EventStream(outputs, stream, edge, framing=FRAMING)
    return await whole(request, outputs, Gathered(stream, lambda: stream.message))


@router.post(_COUNT_PATH, **_documentation(TokenCount, CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """The number of tokens of the prompt that the same body would make."""
    body = await read_request(request, CountTokensRequest, MESSAGES_REFUSALS, from_headers={})
    note_ignored(request, ignored_names(body))
    chat = chat_request_of(body)
    with in_their_words(body):
        prompt = await prompt_of(request, chat)
    return json_reply({"input_tokens": len(prompt.token_ids)})
