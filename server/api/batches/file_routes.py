"""/v1/files: uploads of requests for batches, and the answers to download."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from server.api.batches.access import (
    add_state_access,
    desk_of,
    owner_of,
    page_asked,
    page_reply,
    unix_time_s,
)
from server.api.batches.multipart import read_form
from server.api.batches.store import NewFile
from server.edge.error_replies import ObjectNotFound
from server.edge.http.endpoint import (
    ERRORS,
    NO_STORE,
    Endpoint,
    ReplyModel,
    ReplyPage,
    documentation,
    documentation_of_one,
    json_reply,
)
from server.edge.refusals import required, unsupported
from server.reply.generate.long_reply import LongReply

_PATH = "/v1/files"
_PURPOSES = ("batch", "vision", "user_data")
"""Purposes of files that clients bring: of requests, and of pictures."""
_ONE = "/v1/files/{file_id}"
_MAX_NAME_CHARS = 255
_MOST = 10_000
_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": _MOST, "default": _MOST},
    "after": {"type": "string"},
    "purpose": {"type": "string"},
}


class FileObject(ReplyModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output", "vision", "user_data"]
    status: Literal["processed"]
    status_details: None


class FileList(ReplyPage):
    data: Annotated[list[FileObject], Field(max_length=_MOST)]


class FileDeletion(ReplyModel):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


def _upload_documentation() -> dict[str, Any]:
    fields = {
        "file": {"type": "string", "contentMediaType": "application/jsonl"},
        "purpose": {"enum": list(_PURPOSES)},
    }
    schema = {"type": "object", "required": ["file", "purpose"], "properties": fields}
    found = documentation(FileObject)
    found["openapi_extra"] = {
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    }
    return found


def _content_documentation() -> dict[str, Any]:
    schema = {"type": "string", "contentMediaType": "application/jsonl"}
    success = {"description": "The file.", "content": {"application/octet-stream": {"schema": schema}}}
    found = documentation_of_one(FileObject, "file_id")
    return {**found, "responses": {200: success, **ERRORS}}


router = APIRouter()
ENDPOINT = Endpoint(router=router, add_state=add_state_access)


@router.post(_PATH, **_upload_documentation())
async def upload_file(request: Request) -> Response:
    """Keep a file: requests for a batch, or a picture for a response."""
    desk = desk_of(request)
    _ = desk.store  # refuses before the body is read
    fields = read_form(request.headers.get("content-type", ""), await request.body())
    file = required(fields.get("file"), "file")
    purpose = required(fields.get("purpose"), "purpose").content.decode(errors="replace")
    if purpose not in _PURPOSES:
        raise unsupported("purpose", f"purpose must be one of {', '.join(_PURPOSES)}: requests or a picture")
    for name in fields.keys() - {"file", "purpose"}:
        raise unsupported(name[:64], f"{name[:64]} is not supported: files are deleted after 30 days")
    new = NewFile(
        filename=(file.filename or "upload.jsonl")[:_MAX_NAME_CHARS],
        created_s=unix_time_s(),
        content=file.content,
        purpose=purpose,
    )
    owner = owner_of(request)
    return json_reply(await desk.do(lambda store: store.add_file(owner, new)), NO_STORE)


@router.get(_PATH, **documentation(FileList, query=_QUERY))
async def list_files(request: Request) -> Response:
    """List the files of this key, the newest first."""
    page = page_asked(request, default=_MOST, most=_MOST)
    owner, purpose = owner_of(request), request.query_params.get("purpose")
    return page_reply(await desk_of(request).do(lambda store: store.files(owner, page, purpose)), page)


@router.get(_ONE, **documentation_of_one(FileObject, "file_id"))
async def retrieve_file(request: Request) -> Response:
    """Describe a file."""
    return json_reply(await _file_of(request), NO_STORE)


@router.get(f"{_ONE}/content", **_content_documentation())
async def download_file(request: Request) -> Response:
    """Return the bytes of a file."""
    file = await _file_of(request)
    desk = desk_of(request)

    async def pieces() -> AsyncIterator[bytes]:
        async for part in desk.parts(file["id"]):
            for _, content in part:
                yield content

    return LongReply(pieces(), file["bytes"], NO_STORE, media_type="application/octet-stream")


@router.delete(_ONE, **documentation_of_one(FileDeletion, "file_id"))
async def delete_file(request: Request) -> Response:
    """Delete a file, unless a batch under way reads it."""
    owner, file_id = owner_of(request), request.path_params["file_id"]
    if not await desk_of(request).do(lambda store: store.delete_file(owner, file_id)):
        raise ObjectNotFound("file", file_id)
    return json_reply({"id": file_id, "object": "file", "deleted": True}, NO_STORE)


async def _file_of(request: Request) -> dict[str, Any]:
    """Describe the file that the path names. Raises ObjectNotFound."""
    owner, file_id = owner_of(request), request.path_params["file_id"]
    found = await desk_of(request).do(lambda store: store.file(owner, file_id))
    if found is None:
        raise ObjectNotFound("file", file_id)
    return found
