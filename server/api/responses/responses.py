"""POST /v1/responses."""

import secrets
import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.batches.access import owner_of
from server.api.responses.background import Work
from server.api.responses.event_log import EventLog, LoggedEvents
from server.api.responses.events import error_event
from server.api.responses.making import (
    ResponseTask,
    begin_making,
    conversation_of,
    count_input_tokens,
    stored_response,
)
from server.api.responses.models import InputTokens, ResponseEvent, ResponseObject
from server.api.responses.protocol import RESPONSES_REFUSALS, ResponsesRequest
from server.api.responses.stored_routes import (
    add_store,
    background_of,
    earlier_response,
    is_stored,
    kept_of,
    store_of,
    with_stored,
)
from server.api.responses.stored_routes import router as stored_router
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import NO_STORE, Endpoint, add_named_events, documentation, json_reply
from server.edge.http.json_body import read_request
from server.reply.generate.answering import whole
from server.reply.generate.calls import read_call
from server.reply.generate.replies import Gathered
from server.reply.generate.sse import EventStream, Framing, named_event

_PATH = "/v1/responses"
_DOCUMENTATION = documentation(ResponseObject, request=ResponsesRequest)
add_named_events(
    _DOCUMENTATION,
    ResponseEvent,
    "`response.created` first, and `response.completed`, `response.incomplete` or `response.failed` last;"
    " comments keep the connection alive.",
)

router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    add_state=add_store,
    requests={ResponsesRequest: RESPONSES_REFUSALS},
    events=(ResponseEvent,),
    batch_paths=frozenset({_PATH}),
    operations={_PATH: "chat"},
    event_shapes={_PATH: error_event},
)
BY_ID = Endpoint(router=stored_router)
"""Routes of one that exists. Behind the others: an id may be any word, `input_tokens` too."""


@router.post(_PATH, **_DOCUMENTATION)
async def create_response(request: Request) -> Response:
    """Answer a text or a conversation, which may go on from a stored response."""
    reply_id = f"resp_{secrets.token_hex(24)}"
    body, origin = await read_call(request, ResponsesRequest, RESPONSES_REFUSALS, reply_id=reply_id)
    edge, store = edge_of(request), store_of(request)
    body = await with_stored(request, body)
    task = ResponseTask(
        body=body,
        earlier=earlier_response(request, body),
        origin=origin,
        created_s=int(time.time()),
        is_stored=is_stored(body, store),
    )
    if body.background:
        return await _begin_in_background(request, task)

    def keep(response: dict[str, Any]) -> None:
        if task.is_stored:
            stored = stored_response(owner_of(request), body, task.earlier, response)
            store.add(reply_id, stored, now_s=time.monotonic())

    making = await begin_making(edge, task, on_end=keep)
    outputs = edge.engine.generate_all([making.request], is_read_whole=making.is_read_whole)
    if body.stream:
        framing = Framing(event=named_event, failed=making.reply.fail)
        return EventStream(outputs, making.reply, edge, framing=framing)
    return await whole(request, outputs, Gathered(making.reply, lambda: making.reply.response))


@router.post(f"{_PATH}/input_tokens", **documentation(InputTokens, request=ResponsesRequest))
async def show_input_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a response would have."""
    body = await read_request(request, ResponsesRequest, RESPONSES_REFUSALS, from_headers={})
    body = await with_stored(request, body)
    items = conversation_of(body, earlier_response(request, body))
    num_tokens = await count_input_tokens(request, body, items)
    return json_reply({"object": "response.input_tokens", "input_tokens": num_tokens})


async def _begin_in_background(request: Request, task: ResponseTask) -> Response:
    """Answer with the response object before its first token, or with the stream of its events."""
    edge, background, kept = edge_of(request), background_of(request), kept_of(request)
    owner, is_stream = owner_of(request), bool(task.body.stream)
    background.require_place(owner)
    # The request is checked, and its prompt made, while the client can still be answered with an error.
    task = replace(task, origin=task.origin.beyond_request())
    making = await begin_making(edge, task)
    background.require_place(owner)  # others may have come meanwhile
    events = making.reply.queue()
    response = making.reply.response
    await kept.begin(owner, task, response)
    log = EventLog() if is_stream else None
    if log is not None:
        log.add(events)
    work = Work(
        edge=edge,
        owner=owner,
        task=task,
        making=making,
        reply=making.reply,
        save=kept.saver(owner, task),
        response=response,
        events=log,
        can_be_left=kept.is_on_disk and not is_stream,
    )
    background.begin(response["id"], work, request.scope)
    return json_reply(response, NO_STORE) if log is None else LoggedEvents(log, 0, edge)
