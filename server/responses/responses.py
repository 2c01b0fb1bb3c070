"""POST /v1/responses, and the routes of a stored response.

Owns: the way from body to reply, the conversation that a request continues, and the stored part of a reply.
Never: rendering or generating: that is the chat path, step for step.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any, cast

import orjson
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import ContextLengthExceeded, RequestRejected
from server.access.auth import KEY_NAME
from server.chat.chat_replies import ChatStream
from server.chat.chat_turn import ChatTurn, prepare_turn
from server.error_replies import ResponseNotFound
from server.generate.answering import new_head, whole
from server.generate.calls import Origin, read_call
from server.generate.replies import ReplyHead, ReplyPlan, UsageReport
from server.generate.sse import EventStream
from server.http.edge import Edge, EdgeSettings, edge_of
from server.http.endpoint import ERRORS, Endpoint, documentation, documentation_of_one, reference
from server.refusals import unsupported
from server.responses.input_items import MAX_PAGE_ITEMS, page_of, page_request
from server.responses.response_models import InputItemPage, ResponseDeletion, ResponseEvent, ResponseObject
from server.responses.response_store import ResponseStore, StoredResponse, weigh
from server.responses.responses_events import ResponseFraming, ResponseStream, WholeResponse
from server.responses.responses_input import (
    chat_request_of,
    cut_before,
    in_our_words,
    num_parts,
    said_item,
    turns,
    wants_logprobs,
)
from server.responses.responses_protocol import RESPONSES_REFUSALS, InputItem, ResponsesRequest
from server.responses.responses_replies import ResponsePlan

_MAX_INLINE_PARTS = 1024
"""More are converted in a thread, so that other streams go on meanwhile: 4096 took 60 ms."""
_PATH = "/v1/responses"
_ONE = "/v1/responses/{response_id}"
_NO_STORE = {"cache-control": "no-store"}
_PAGE_PARAMETERS: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_ITEMS, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
_STREAM_NOTE = (
    "With `stream`: server-sent events whose names are their types, `response.created` first, and"
    " `response.completed`, `response.incomplete` or `response.failed` last; comments keep the connection"
    " alive."
)


def _create_documentation() -> dict[str, Any]:
    payload = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": reference(ResponseEvent),
    }
    properties = {"event": {"type": "string"}, "data": payload}
    event = {"type": "object", "required": ["event", "data"], "properties": properties}
    found = documentation(ResponseObject, request=ResponsesRequest)
    found["responses"][200] |= {
        "description": _STREAM_NOTE,
        "content": {"text/event-stream": {"schema": event}},
    }
    return found


def _cancel_documentation() -> dict[str, Any]:
    """Errors only: there is no response that could be cancelled."""
    return {**documentation_of_one(ResponseObject, "response_id"), "responses": dict(ERRORS)}


def _add_store(app: FastAPI, settings: EdgeSettings) -> None:
    app.state.response_store = ResponseStore(
        max_responses=settings.responses_store_size,
        max_bytes=settings.responses_store_bytes,
        ttl_s=settings.responses_store_ttl_s,
    )


router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    add_state=_add_store,
    requests={ResponsesRequest: RESPONSES_REFUSALS},
    events=(ResponseEvent,),
    batch_paths=frozenset({_PATH}),
    operations={_PATH: "chat"},
)


@router.post(_PATH, **_create_documentation())
async def create_response(request: Request) -> Response:
    """Answer a text or a conversation, which may go on from a stored response."""
    edge, store = edge_of(request), store_of(request)
    reply_id = f"resp_{secrets.token_hex(24)}"
    body, origin = await read_call(request, ResponsesRequest, RESPONSES_REFUSALS, reply_id=reply_id)
    is_stored = _is_stored(body, store)
    earlier = _earlier(request, store, body)
    turn = await _prepare(edge, body, _conversation(body, earlier), origin)
    head = new_head(origin, edge.engine.info)

    def keep(response: dict[str, Any]) -> None:
        if is_stored:
            stored = _stored(_owner(request), body, earlier, response)
            store.add(reply_id, stored, now_s=time.monotonic())

    plan = ResponsePlan(
        id=reply_id,
        created_s=head.created_s,
        model=head.model,
        body=body,
        params=turn.request.params,
        is_stored=is_stored,
    )
    chat = ChatStream(_chat_plan(body, turn, head), turn.reading)
    reply = ResponseStream(plan, chat, on_end=keep, unix_time_s=time.time)
    outputs = edge.engine.generate_all([turn.request])
    if body.stream:
        return EventStream(outputs, reply, edge, framing=ResponseFraming(reply))
    return await whole(request, outputs, WholeResponse(reply))


@router.api_route(_ONE, methods=["GET", "DELETE"], include_in_schema=False)
async def use_stored_response(request: Request) -> Response:
    """Serve both methods, so that the Allow header of a 405 names both; the routes below document them."""
    return await (delete_response if request.method == "DELETE" else retrieve_response)(request)


@router.get(_ONE, **documentation_of_one(ResponseObject, "response_id"))
async def retrieve_response(request: Request) -> Response:
    """Return a stored response, as it was sent."""
    return Response(_stored_here(request).body, headers=_NO_STORE, media_type="application/json")


@router.get(
    f"{_ONE}/input_items",
    **documentation_of_one(InputItemPage, "response_id", query=_PAGE_PARAMETERS),
)
async def list_input_items(request: Request) -> Response:
    """List the input items of a stored response, without the items of earlier responses."""
    asked = page_request(request.query_params)
    items, response_id = _stored_here(request).input, request.path_params["response_id"]
    # In a thread, since there may be as much text as a body holds.
    page = await asyncio.to_thread(lambda: orjson.dumps(page_of(items, response_id, asked)))
    return Response(page, headers=_NO_STORE, media_type="application/json")


@router.post(f"{_ONE}/cancel", **_cancel_documentation())
async def cancel_response(request: Request) -> Response:
    """Refused, as by OpenAI, for a response that is not computed in the background: none is, here."""
    _stored_here(request)
    raise RequestRejected(
        "Cannot cancel a synchronous response: only responses created with background set to true can be"
        " cancelled. To end this one early, close its connection",
        param="response_id",
    )


@router.delete(_ONE, **documentation_of_one(ResponseDeletion, "response_id"))
async def delete_response(request: Request) -> Response:
    """Delete a stored response. Responses that continue it stay."""
    response_id = request.path_params["response_id"]
    if not store_of(request).delete(response_id, owner=_owner(request), now_s=time.monotonic()):
        raise ResponseNotFound(response_id)
    body = {"id": response_id, "object": "response", "deleted": True}
    return Response(orjson.dumps(body), media_type="application/json")


def _stored_here(request: Request) -> StoredResponse:
    """The stored response that the path names. Raises ResponseNotFound."""
    response_id = request.path_params["response_id"]
    stored = store_of(request).find(response_id, owner=_owner(request), now_s=time.monotonic())
    if stored is None:
        raise ResponseNotFound(response_id)
    return stored


def store_of(request: Request) -> ResponseStore:
    return cast(ResponseStore, request.app.state.response_store)


def _owner(request: Request) -> str:
    """Name of the key; without keys all callers are one owner."""
    return str(request.scope.get(KEY_NAME, ""))


def _is_stored(body: ResponsesRequest, store: ResponseStore) -> bool:
    """True unless store is off. Raises RequestRejected for a request to store where that is impossible."""
    if body.store and not store.is_open:
        raise unsupported("store", "store: this server stores no responses; send the whole conversation")
    return store.is_open and body.store is not False


def _earlier(request: Request, store: ResponseStore, body: ResponsesRequest) -> StoredResponse | None:
    if body.previous_response_id is None:
        return None
    found = store.find(body.previous_response_id, owner=_owner(request), now_s=time.monotonic())
    if found is None:
        raise RequestRejected(
            f"there is no stored response {body.previous_response_id!r} (any more);"
            " send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _conversation(body: ResponsesRequest, earlier: StoredResponse | None) -> tuple[InputItem, ...]:
    """The items of the earlier response and of this request. Raises RequestRejected if there are none."""
    items = (*(earlier.conversation if earlier else ()), *body.input)
    if not items and body.instructions is None:
        raise RequestRejected("input must not be an empty list", param="input")
    return items


def _chat_plan(body: ResponsesRequest, turn: ChatTurn, head: ReplyHead) -> ReplyPlan:
    return ReplyPlan(
        head=head,
        num_prompt_tokens=(len(turn.prompt_ids),),
        n=1,
        has_logprobs=wants_logprobs(body),
        usage=UsageReport(at_end=True),
    )


def _stored(
    owner: str, body: ResponsesRequest, earlier: StoredResponse | None, response: dict[str, Any]
) -> StoredResponse:
    new = (*body.input, *map(said_item, response["output"]))
    return StoredResponse(
        owner=owner,
        body=orjson.dumps(response),
        input=tuple(body.input),
        conversation=(*(earlier.conversation if earlier else ()), *new),
        num_conversation_bytes=weigh(new) + (earlier.num_conversation_bytes if earlier else 0),
    )


async def _prepare(
    edge: Edge, body: ResponsesRequest, items: Sequence[InputItem], origin: Origin
) -> ChatTurn:
    """The chat path up to the first token, its errors in the words of this endpoint."""
    with in_our_words():
        prepare = _turn_that_fits if body.truncation == "auto" else _turn
        return await prepare(edge, body, items, origin)


async def _turn(edge: Edge, body: ResponsesRequest, items: Sequence[InputItem], origin: Origin) -> ChatTurn:
    """The chat path up to the first token. Raises RequestRejected, Overloaded."""
    if num_parts(items) > _MAX_INLINE_PARTS:
        chat = await asyncio.to_thread(chat_request_of, body, items)
    else:
        chat = chat_request_of(body, items)
    return await prepare_turn(edge, chat, origin)


async def _turn_that_fits(
    edge: Edge, body: ResponsesRequest, items: Sequence[InputItem], origin: Origin
) -> ChatTurn:
    """Leave out as few of the oldest turns as possible. Raises ContextLengthExceeded if one is too long."""
    try:
        return await _turn(edge, body, items, origin)
    except ContextLengthExceeded:
        places = turns(items)
        if not places:
            raise
    # The fewer turns, the shorter: each try rules out half of the remaining ones.
    low, high = 0, len(places) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            await _turn(edge, body, cut_before(items, places[middle]), origin)
        except ContextLengthExceeded:
            low = middle + 1
        else:
            high = middle
    return await _turn(edge, body, cut_before(items, places[low]), origin)
