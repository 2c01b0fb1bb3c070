"""Files that a request names as its pictures.

Owns: what may be read for it: only pictures, and no more than one request may bring into memory.
"""

import asyncio
import base64
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request

from engine.errors import RequestRejected
from server.api.batches.access import desk_of, owner_of
from server.reply.pictures.fetching import MAX_FETCHED_BYTES
from server.reply.pictures.media_parts import data_url

_PURPOSES: Final = ("vision", "user_data")
_MAX_BYTES: Final = 2 * MAX_FETCHED_BYTES
"""Size of the files of one request: all are in memory at once, and stay there in a stored response."""


async def urls_of_files(request: Request, ids: Sequence[str]) -> dict[str, str]:
    """Return data URLs of files of the request's key, by their ids. Raises RequestRejected."""
    num_bytes = {file_id: await _size_of(request, file_id) for file_id in dict.fromkeys(ids)}
    if sum(map(num_bytes.__getitem__, ids)) > _MAX_BYTES:
        raise _refused(f"the files of one request may have {_MAX_BYTES >> 20} MiB in all")
    return {file_id: await _url_of(request, file_id) for file_id in num_bytes}


async def _size_of(request: Request, file_id: str) -> int:
    owner = owner_of(request)
    file = await desk_of(request).do(lambda store: store.file(owner, file_id))
    if file is None:
        raise _refused(f"there is no file {file_id!r}")
    if file["purpose"] not in _PURPOSES:
        raise _refused(f"{file_id!r} was uploaded for {file['purpose']}, not for {' or '.join(_PURPOSES)}")
    if file["bytes"] > MAX_FETCHED_BYTES:
        raise _refused(f"{file_id!r} has more than the {MAX_FETCHED_BYTES >> 20} MiB of a picture")
    return int(file["bytes"])


async def _url_of(request: Request, file_id: str) -> str:
    content = b"".join([content async for part in desk_of(request).parts(file_id) for _, content in part])
    return data_url("", (await asyncio.to_thread(base64.b64encode, content)).decode())


def _refused(reason: str) -> RequestRejected:
    return RequestRejected(f"file_id: {reason}", param="file_id")
