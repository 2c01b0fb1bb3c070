"""The store of one server, and the word that there is a batch to begin or to cancel.

Owns: the refusal of routes where no folder is given, and the owner of a request.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestRejected
from server.access.auth import KEY_NAME
from server.http.edge import EdgeSettings
from server.refusals import unsupported
from server.state.state_store import FileInUse, Page, StateStore, StorageFull, open_store

ResultT = TypeVar("ResultT")


class StateDesk:
    """Without a folder it refuses everything."""

    def __init__(self, folder: str | None, *, max_bytes: int) -> None:
        """Raises OptionError if the folder cannot be used."""
        self._store: StateStore | None = None
        if folder is not None:
            self._store = open_store(folder, max_bytes=max_bytes)
        self.changed = asyncio.Event()
        """Set when a batch was added or is to be cancelled."""

    def close(self) -> None:
        """Close the store, if there is one."""
        if self._store is not None:
            self._store.close()

    @property
    def is_open(self) -> bool:
        return self._store is not None

    @property
    def store(self) -> StateStore:
        """Raises RequestRejected if there is none."""
        if self._store is None:
            raise unsupported(
                "state", "this server keeps no files and batches: it was started without --state-folder"
            )
        return self._store

    async def do(self, action: Callable[[StateStore], ResultT]) -> ResultT:
        """Do one thing with the store in a thread. Raises RequestRejected."""
        store = self.store
        try:
            return await asyncio.to_thread(action, store)
        except FileInUse as error:
            raise RequestRejected(str(error), param="file_id") from None
        except StorageFull as error:
            raise RequestRejected(str(error), code="storage_full") from None


def add_desk(app: FastAPI, settings: EdgeSettings) -> None:
    """Put the one desk of all routes into the state of the application."""
    if not hasattr(app.state, "desk"):
        edge = settings.edge
        app.state.desk = StateDesk(edge.state_folder, max_bytes=edge.state_max_bytes)


def desk_of(request: Request) -> StateDesk:
    return cast(StateDesk, request.app.state.desk)


def owner_of(request: Request) -> str:
    """Name of the key; without keys all callers are one owner."""
    return str(request.scope.get(KEY_NAME, ""))


def unix_time_s() -> int:
    return int(time.time())


def page_asked(request: Request, *, default: int, most: int) -> Page:
    """Read `limit` and `after` of a list. Raises RequestRejected."""
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise RequestRejected(f"limit must be a number from 1 to {most}", param="limit")
    return Page(limit=int(text), after=request.query_params.get("after"))


def page_reply(items: list[dict[str, Any]], page: Page) -> Response:
    """A list as OpenAI's API has it, of items that may be one more than the page holds."""
    shown = items[: page.limit]
    return json_reply(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(items) > page.limit,
        }
    )


def json_reply(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json", headers={"cache-control": "no-store"})
