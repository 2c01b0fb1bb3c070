"""Responses of the background on disk, and their return after a restart of the server.

Owns: the written form of a request, from which it can be made again, and what a start does with each:
one at its end is stored again, one under way is made again, and one that was streamed has failed.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import orjson
from fastapi import FastAPI

from server.api.batches.access import StateAccess, settled_time_s
from server.api.batches.store import ResponseBounds, ResponseRow, StateStore
from server.api.responses.background import BackgroundResponses, Work
from server.api.responses.making import ResponseTask, stored_response
from server.api.responses.protocol import InputItem, ResponsesRequest
from server.api.responses.store import MAX_RESPONSES, ResponseStore, StoredResponse, weigh
from server.edge.access.key_ring import KeyRing
from server.edge.access.rate_limits import Allowance, Caller
from server.edge.error_replies import InvalidApiKey, ModelNotFound
from server.edge.http.edge import Edge, EdgeSettings
from server.edge.http.served_models import ServedModels
from server.reply.generate.calls import Origin, service_terms

log = logging.getLogger(__name__)

_INTERRUPTED = {
    "code": "server_error",
    "message": "the server was restarted, and a stream cannot be gone on with: ask again",
}


class KeptResponses:
    """The store in memory, and the copy of what came from the background on disk, if there is a folder."""

    def __init__(self, store: ResponseStore, desk: StateAccess, settings: EdgeSettings) -> None:
        self._store = store
        self._desk = desk
        self._bounds = ResponseBounds(max_responses=MAX_RESPONSES, max_bytes=settings.responses_store_bytes)

    @property
    def is_on_disk(self) -> bool:
        """True if a restart loses nothing."""
        return self._desk.is_open

    async def begin(self, owner: str, task: ResponseTask, response: dict[str, Any]) -> None:
        """Write down a response that is to be made, before the client hears of it."""
        if not self._desk.is_open:
            return

        def add(store: StateStore) -> None:
            row = ResponseRow(
                id=response["id"],
                owner=owner,
                is_open=True,
                changed_s=settled_time_s(),
                request=_written(task),
                body=orjson.dumps(response),
            )
            store.add_response(row)

        await self._desk.do(add)

    def saver(self, owner: str, task: ResponseTask) -> Callable[[dict[str, Any]], Awaitable[None]]:
        """Return a function that keeps the response at its end."""

        async def save(response: dict[str, Any]) -> None:
            stored = stored_response(owner, task.body, task.earlier, response)
            self._store.add(response["id"], stored, now_s=time.monotonic())
            if self._desk.is_open:
                await self._desk.keep(
                    lambda rows: rows.end_response(
                        response["id"], stored.body, self._bounds, now_s=settled_time_s()
                    )
                )

        return save

    async def delete(self, owner: str, response_id: str) -> None:
        if self._desk.is_open:
            await self._desk.do(lambda rows: rows.delete_response(owner, response_id))

    def store_again(self, row: ResponseRow, task: ResponseTask, response: dict[str, Any]) -> None:
        """Store a response that had its end before the restart."""
        stored = stored_response(row.owner, task.body, task.earlier, response)
        self._store.add(row.id, stored, now_s=time.monotonic() - settled_time_s() + row.changed_s)

    async def ids(self) -> list[str]:
        """List what is on disk, the response that changed last at the end."""
        return await self._desk.keep(StateStore.response_ids) if self._desk.is_open else []

    async def row(self, response_id: str) -> ResponseRow | None:
        """Read one back; None if it is no longer there."""
        return await self._desk.keep(lambda rows: rows.response(response_id))


async def go_on(app: FastAPI) -> None:
    """Take up what the last run of the server left on disk. Raises nothing."""
    edge = cast(Edge, app.state.edge)
    kept = cast(KeptResponses, app.state.kept_responses)
    try:
        ids = await kept.ids()
    except Exception:
        log.exception("no response on disk can be taken up before the next start")
        edge.metrics.count_background_fault("responses")
        return
    for response_id in ids:
        try:
            row = await kept.row(response_id)
            if row is not None:
                await _take_up(app, kept, row)
        except Exception:  # one row that cannot be read must not keep the others back
            log.exception("a response on disk cannot be taken up: %s", response_id)
            edge.metrics.count_background_fault("response")


async def _take_up(app: FastAPI, kept: KeptResponses, row: ResponseRow) -> None:
    try:
        task = _read(row, cast(KeyRing, app.state.keys))
    except InvalidApiKey:  # no client could fetch it
        await kept.delete(row.owner, row.id)
        return
    save, response = kept.saver(row.owner, task), orjson.loads(row.body)
    if not row.is_open:
        kept.store_again(row, task, response)
        return
    if task.body.stream:
        await save(response | {"status": "failed", "error": _INTERRUPTED})
        return
    keys, models = cast(KeyRing, app.state.keys), cast(ServedModels, app.state.models)
    try:
        edge = models.find(task.body.model, keys.named(row.owner))
    except ModelNotFound as error:
        await save(response | {"status": "failed", "error": {"code": "server_error", "message": str(error)}})
    else:
        background = cast(BackgroundResponses, app.state.background)
        work = Work(edge=edge, owner=row.owner, task=task, save=save, response=response, can_be_left=True)
        background.begin(row.id, work)


def _written(task: ResponseTask) -> bytes:
    body = task.body.model_dump(mode="json", by_alias=True, exclude_none=True)
    items = None
    if task.earlier is not None:
        items = [item.model_dump(mode="json", exclude_none=True) for item in task.earlier.conversation]
    return orjson.dumps(
        {
            "body": body,
            "earlier": items,
            "tenant": task.origin.terms.tenant,
            "created_at": task.created_s,
        }
    )


def _read(row: ResponseRow, keys: KeyRing) -> ResponseTask:
    """Read a request back. Raises InvalidApiKey if its key is not known any more."""
    written = orjson.loads(row.request)
    body = ResponsesRequest.model_validate(written["body"])
    key = keys.named(row.owner)
    if key is None and keys.is_locked and row.is_open:
        raise InvalidApiKey("the API key of this response is not known here any more")
    origin = Origin(
        reply_id=row.id,
        terms=service_terms(body, key, written["tenant"]),
        model=body.model,
        max_tenant_tokens=key.max_queued_tokens if key else None,
        allowance=Allowance(keys.rates, key, Caller.CLIENT),
    )
    return ResponseTask(
        body=body,
        earlier=_earlier(row.owner, written["earlier"]),
        origin=origin,
        created_s=written["created_at"],
        is_stored=True,
    )


def _earlier(owner: str, written: list[dict[str, Any]] | None) -> StoredResponse | None:
    if written is None:
        return None
    items = tuple(map(InputItem.model_validate, written))
    return StoredResponse(
        owner=owner, body=b"", input=(), conversation=items, num_conversation_bytes=weigh(items)
    )
