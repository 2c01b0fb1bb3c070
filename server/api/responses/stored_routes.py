"""The routes of a response that is stored or under way in the background.

Owns: the access to a response by its owner, and the objects that all routes of responses share.
"""

import asyncio
import time
from functools import partial
from typing import Any, cast

import orjson
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestRejected
from server.api.batches.access import add_state_access, owner_of
from server.api.batches.named_files import urls_of_files
from server.api.responses.background import BackgroundResponses, Work
from server.api.responses.event_log import LoggedEvents
from server.api.responses.input_items import MAX_PAGE_ITEMS, page_of, page_request, with_references
from server.api.responses.kept_responses import KeptResponses
from server.api.responses.models import InputItemPage, ResponseDeletion, ResponseObject
from server.api.responses.protocol import InputItem, ItemPart, ResponsesRequest
from server.api.responses.store import MAX_RESPONSES, ResponseStore, StoredResponse
from server.edge.error_replies import ResponseNotFound
from server.edge.http.edge import EdgeSettings, edge_of
from server.edge.http.endpoint import NO_STORE, documentation_of_one, json_reply
from server.edge.refusals import unsupported, whole_number
from server.reply.pictures.placing import check_num_pictures

_FIELDS = ("content", "output")
"""Parts of an item."""
_ONE = "/v1/responses/{response_id}"
_MAX_EVENT = 10**9 - 1
_PAGE_PARAMETERS: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_ITEMS, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
_FOLLOW_PARAMETERS: dict[str, dict[str, Any]] = {
    "stream": {"type": "boolean", "default": False},
    "starting_after": {"type": "integer", "minimum": 0},
}

router = APIRouter()


def add_store(app: FastAPI, settings: EdgeSettings) -> None:
    """Put the objects that only routes of responses use into the state of the application."""
    app.state.response_store = ResponseStore(
        max_responses=MAX_RESPONSES, max_bytes=settings.responses_store_bytes
    )
    add_state_access(app, settings)
    app.state.kept_responses = KeptResponses(app.state.response_store, app.state.desk, settings)
    app.state.background = BackgroundResponses(app.state.edge, max_event_bytes=settings.responses_store_bytes)


@router.get(_ONE, **documentation_of_one(ResponseObject, "response_id", query=_FOLLOW_PARAMETERS))
async def retrieve_response(request: Request) -> Response:
    """Return a response as it is now, or follow its events if it was begun as a stream in the background."""
    work = _work_here(request)
    body = _stored_here(request).body if work is None else orjson.dumps(work.response)
    start = _start_of_stream(request)
    if start is None:
        return _json(body)
    log = background_of(request).events_of(request.path_params["response_id"])
    if log is None:
        raise RequestRejected(
            "stream: only a response that was created with background and stream has events, for as long as"
            " there is room for them; retrieve it without stream",
            param="stream",
        )
    log.require(start)
    return LoggedEvents(log, start, edge_of(request))


@router.get(
    f"{_ONE}/input_items",
    **documentation_of_one(InputItemPage, "response_id", query=_PAGE_PARAMETERS),
)
async def list_input_items(request: Request) -> Response:
    """List the input items of a response, stored or under way, without the items of earlier responses."""
    asked, work = page_request(request.query_params), _work_here(request)
    items = _stored_here(request).input if work is None else work.task.body.input
    response_id = request.path_params["response_id"]
    # In a thread, since there may be as much text as a body holds.
    page = await asyncio.to_thread(lambda: orjson.dumps(page_of(items, response_id, asked)))
    return _json(page)


@router.post(f"{_ONE}/cancel", **documentation_of_one(ResponseObject, "response_id"))
async def cancel_response(request: Request) -> Response:
    """Cancel a response of the background. One at its end stays as it is; any other cannot be cancelled."""
    work = _work_here(request)
    if work is not None:
        return json_reply(await background_of(request).cancel(work), NO_STORE)
    body = _stored_here(request).body
    if orjson.loads(body)["background"]:
        return _json(body)
    raise RequestRejected(
        "Cannot cancel a synchronous response: only responses created with background set to true can be"
        " cancelled. To end this one early, close its connection",
        param="response_id",
    )


@router.delete(_ONE, **documentation_of_one(ResponseDeletion, "response_id"))
async def delete_response(request: Request) -> Response:
    """Delete a response, under way or stored. Responses that continue it stay."""
    response_id, owner = request.path_params["response_id"], owner_of(request)
    work = _work_here(request)
    if work is not None:
        await background_of(request).cancel(work)
    else:
        _stored_here(request)
    store_of(request).delete(response_id, owner=owner, now_s=time.monotonic())
    background_of(request).forget_events(response_id)
    await kept_of(request).delete(owner, response_id)
    return json_reply({"id": response_id, "object": "response", "deleted": True}, NO_STORE)


def _json(body: bytes) -> Response:
    return Response(body, headers=NO_STORE, media_type="application/json")


def _start_of_stream(request: Request) -> int | None:
    """The number of the first event that is asked for; None: no events. Raises RequestRejected."""
    stream, after = request.query_params.get("stream", "false"), request.query_params.get("starting_after")
    if stream not in ("true", "false"):
        raise RequestRejected(f"stream must be true or false, not {stream[:32]!r}", param="stream")
    if after is None:
        return 0 if stream == "true" else None
    if stream == "false":
        raise RequestRejected("starting_after needs stream=true", param="starting_after")
    return whole_number(request.query_params, "starting_after", most=_MAX_EVENT, default=0) + 1


def _work_here(request: Request) -> Work | None:
    """The response under way that the path names, if it is one."""
    return background_of(request).find(request.path_params["response_id"], owner=owner_of(request))


def background_of(request: Request) -> BackgroundResponses:
    return cast(BackgroundResponses, request.app.state.background)


def kept_of(request: Request) -> KeptResponses:
    return cast(KeptResponses, request.app.state.kept_responses)


def _stored_here(request: Request) -> StoredResponse:
    """The stored response that the path names. Raises ResponseNotFound."""
    response_id = request.path_params["response_id"]
    stored = _find(request, response_id)
    if stored is None:
        raise ResponseNotFound(response_id)
    return stored


def _find(request: Request, response_id: str) -> StoredResponse | None:
    return store_of(request).find(response_id, owner=owner_of(request), now_s=time.monotonic())


def store_of(request: Request) -> ResponseStore:
    return cast(ResponseStore, request.app.state.response_store)


def is_stored(body: ResponsesRequest, store: ResponseStore) -> bool:
    """True unless store is off. Raises RequestRejected for a request that needs it where there is none."""
    if body.store and not store.is_open:
        raise unsupported("store", "store: this server stores no responses; send the whole conversation")
    is_stored = store.is_open and body.store is not False
    if body.background and not is_stored:
        why = "background can only be used when `store` is true, or it could not be fetched"
        raise unsupported("background", why)
    return is_stored


def earlier_response(request: Request, body: ResponsesRequest) -> StoredResponse | None:
    if body.previous_response_id is None:
        return None
    found = _find(request, body.previous_response_id)
    if found is not None:
        return found
    if background_of(request).find(body.previous_response_id, owner=owner_of(request)) is not None:
        raise RequestRejected(
            f"the response {body.previous_response_id!r} is under way: go on from it after its end",
            param="previous_response_id",
        )
    raise RequestRejected(
        f"there is no stored response {body.previous_response_id!r} (any more);"
        " send the whole conversation as input",
        param="previous_response_id",
        code="previous_response_not_found",
    )


async def with_stored(request: Request, body: ResponsesRequest) -> ResponsesRequest:
    """Put items that are stored, and pictures that are files of ours, into a request.

    Raises RequestRejected, ResponseNotFound.
    """
    if any(item.type == "item_reference" for item in body.input):
        items = with_references(body.input, partial(_find, request))
        body = body.model_copy(update={"input": items})
    pictures = [part for item in body.input for name in _FIELDS for part in _pictures(item, name)]
    ids = [part.file_id for part in pictures if part.file_id is not None]
    if not ids:
        return body
    engine = edge_of(request).engine
    if engine.info.vision is not None and body.truncation != "auto":  # which cuts by their number
        check_num_pictures(len(pictures), engine.pictures.config, param="input")
    urls = await urls_of_files(request, ids)
    return body.model_copy(update={"input": [_with_urls(item, urls) for item in body.input]})


def _pictures(item: InputItem, name: str) -> list[ItemPart]:
    return [part for part in getattr(item, name) or () if part.type == "input_image"]


def _with_urls(item: InputItem, urls: dict[str, str]) -> InputItem:
    changed = {
        name: [
            part.model_copy(update={"file_id": None, "image_url": urls[part.file_id]})
            if part.type == "input_image" and part.file_id is not None
            else part
            for part in getattr(item, name)
        ]
        for name in _FIELDS
        if any(part.file_id is not None for part in _pictures(item, name))
    }
    return item.model_copy(update=changed) if changed else item
