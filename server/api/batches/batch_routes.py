"""/v1/batches: files of requests, answered when nothing more urgent waits."""

import secrets
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestRejected
from server.api.batches.access import (
    add_state_access,
    desk_of,
    owner_of,
    page_asked,
    page_reply,
    unix_time_s,
)
from server.edge.error_replies import ObjectNotFound
from server.edge.http.endpoint import (
    NO_STORE,
    Endpoint,
    ReplyModel,
    ReplyPage,
    documentation,
    documentation_of_one,
    json_reply,
)
from server.edge.http.json_body import read_request
from server.edge.refusals import unsupported
from server.edge.wire_model import WireModel

_PATH = "/v1/batches"
_ONE = "/v1/batches/{batch_id}"
WINDOW_S = 24 * 3600
_MOST = 100
_BEGINNING = {"validating", "in_progress"}
_NO_COUNTS = {"total": 0, "completed": 0, "failed": 0}
_TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at"),
    "cancelled_at",
)
_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": _MOST, "default": 20},
    "after": {"type": "string"},
}
_Id = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_MetadataKey = Annotated[str, StringConstraints(max_length=64)]
_MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class BatchBeginning(WireModel):
    """The body of POST /v1/batches."""

    input_file_id: _Id
    endpoint: _Id
    """Path that every line of the file names."""
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: dict[str, Any] | None = None
    """Refused by name if it is set."""


class BatchCounts(ReplyModel):
    total: int
    completed: int
    failed: int


class BatchFault(ReplyModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(ReplyModel):
    object: Literal["list"]
    data: list[BatchFault]


class Batch(ReplyModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Literal["validating", "failed", "in_progress", "completed", "expired", "cancelling", "cancelled"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(ReplyPage):
    data: Annotated[list[Batch], Field(max_length=_MOST)]


router = APIRouter()
ENDPOINT = Endpoint(router=router, add_state=add_state_access, requests={BatchBeginning: {}})


@router.post(_PATH, **documentation(Batch, request=BatchBeginning))
async def create_batch(request: Request) -> Response:
    """Begin a batch. Its lines are checked when its turn comes."""
    desk = desk_of(request)
    asked = await read_request(request, BatchBeginning, {}, from_headers={})
    if asked.output_expires_after is not None:
        raise unsupported("output_expires_after", "output_expires_after: files are deleted after 30 days")
    paths = request.app.state.batch_paths
    if asked.endpoint not in paths:
        known = ", ".join(sorted(paths))
        raise RequestRejected(f"endpoint must be one of {known}", param="endpoint")
    owner = owner_of(request)
    file = await desk.do(lambda store: store.file(owner, asked.input_file_id))
    if file is None or file["purpose"] != "batch":
        raise RequestRejected(
            f"input_file_id: there is no file {asked.input_file_id!r} with the purpose batch",
            param="input_file_id",
        )
    body = _new_batch(asked)
    await desk.do(lambda store: store.add_batch(owner, body))
    desk.wake()
    return json_reply(body, NO_STORE)


@router.get(_PATH, **documentation(BatchList, query=_QUERY))
async def list_batches(request: Request) -> Response:
    """List the batches of this key, the newest first."""
    page, owner = page_asked(request, default=20, most=_MOST), owner_of(request)
    return page_reply(await desk_of(request).do(lambda store: store.batches(owner, page)), page)


@router.get(_ONE, **documentation_of_one(Batch, "batch_id"))
async def retrieve_batch(request: Request) -> Response:
    """Return a batch, with the counts of now."""
    return json_reply(await _batch_of(request), NO_STORE)


@router.post(f"{_ONE}/cancel", **documentation_of_one(Batch, "batch_id"))
async def cancel_batch(request: Request) -> Response:
    """Cancel a batch: answers so far stay in its files. A batch at its end stays as it is."""
    batch = await _batch_of(request)
    changes = {"status": "cancelling", "cancelling_at": unix_time_s()}
    desk = desk_of(request)
    await desk.do(lambda store: store.update_batch(batch["id"], changes, expected=_BEGINNING))
    desk.wake()
    return json_reply(await _batch_of(request), NO_STORE)


async def _batch_of(request: Request) -> dict[str, Any]:
    """The batch that the path names. Raises ObjectNotFound."""
    owner, batch_id = owner_of(request), request.path_params["batch_id"]
    found = await desk_of(request).do(lambda store: store.batch(owner, batch_id))
    if found is None:
        raise ObjectNotFound("batch", batch_id)
    return found


def _new_batch(asked: BatchBeginning) -> dict[str, Any]:
    now_s = unix_time_s()
    return {
        "id": f"batch_{secrets.token_hex(16)}",
        "object": "batch",
        "endpoint": asked.endpoint,
        "errors": None,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now_s,
        "expires_at": now_s + WINDOW_S,
        **dict.fromkeys(_TIMES),
        "request_counts": dict(_NO_COUNTS),
        "metadata": asked.metadata,
    }
