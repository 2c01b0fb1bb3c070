"""The store of one server, the word that there is a batch to begin or to cancel, and its clocks.

Owns: the refusal of routes where no folder is given, the owner of a request, and the wait for a disk that
takes no writes: what waits is counted, for health and metrics.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestRejected
from server.api.batches.database import STORAGE_FAULTS, StorageFull
from server.api.batches.store import FileInUse, FilePart, ListPage, StateStore, open_store
from server.edge.access.sent_key import KEY_NAME
from server.edge.http.edge import EdgeSettings
from server.edge.http.endpoint import NO_STORE, json_reply, page_body
from server.edge.refusals import unsupported, whole_number

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
PAUSE_S = 5.0
"""Between two tries of a write."""


class StateAccess:
    """Access to the state folder by one thread; without a folder all is refused."""

    def __init__(self, folder: str | None, *, max_bytes: int) -> None:
        """Raises OptionError if the folder cannot be used."""
        self._store: StateStore | None = None
        if folder is not None:
            self._store = open_store(folder, max_bytes=max_bytes)
        self.changed = asyncio.Event()
        """Set, and replaced, when a batch was added or is to be cancelled."""
        self._waiting: set[object] = set()
        self._keeping: set[object] = set()
        # Of its own, since a slow disk would take one shared thread after the other.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")

    def close(self) -> None:
        self._thread.shutdown()
        if self._store is not None:
            self._store.close()

    def wake(self) -> None:
        """Tell all that wait for `changed`."""
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._store is not None

    @property
    def store(self) -> StateStore:
        """The store. Raises RequestRejected if there is none."""
        if self._store is None:
            raise unsupported(
                "state", "this server keeps no files and batches: it was started without --state-folder"
            )
        return self._store

    @property
    def num_waiting(self) -> int:
        """Count the writes that failed and are tried again. Safe in any thread."""
        return len(self._waiting)

    def degraded(self) -> list[str]:
        """List what health says of it, in any thread."""
        num_waiting = self.num_waiting
        return [f"--state-folder: {num_waiting} writes failed and are tried again"] if num_waiting else []

    async def attempt(self, action: Callable[[StateStore], ResultT]) -> ResultT:
        """Do one thing with the store, in its thread. Raises what the store raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, action, self.store)

    async def keep(self, action: Callable[[StateStore], ResultT]) -> ResultT:
        """Do one thing, again and again until the disk has room for it."""
        waiting = object()
        try:
            while True:
                try:
                    return await self.attempt(action)
                except STORAGE_FAULTS as error:
                    self.waits(waiting, error)
                    self._keeping.add(waiting)
                await asyncio.sleep(PAUSE_S)
        finally:
            self._keeping.discard(waiting)
            self.goes_on(waiting)

    async def parts(self, file_id: str) -> AsyncIterator[FilePart]:
        """Read a file, some of it at a time."""
        last = 0
        while part := await self.keep(partial(StateStore.part, file_id=file_id, after=last)):
            yield part
            last = part[-1][0]

    async def until_kept(self) -> None:
        """Wait while `keep` has something that the disk does not take."""
        while self._keeping:
            await asyncio.sleep(PAUSE_S)

    def waits(self, waiting: object, fault: BaseException) -> None:
        """Note that a write has failed and is to be tried again."""
        if not self._waiting:
            log.error("--state-folder: what failed is tried again every %g s: %s", PAUSE_S, fault)
        self._waiting.add(waiting)

    def goes_on(self, waiting: object) -> None:
        """Note that it waits no more."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            if not self._waiting:
                log.info("--state-folder: nothing waits any more")

    async def do(self, action: Callable[[StateStore], ResultT]) -> ResultT:
        """Do one thing with the store in a thread, for a client. Raises RequestRejected."""
        try:
            return await self.attempt(action)
        except FileInUse as error:
            raise RequestRejected(str(error), param="file_id") from None
        except StorageFull as error:
            raise RequestRejected(str(error), code="storage_full") from None


def add_state_access(app: FastAPI, settings: EdgeSettings) -> None:
    """Put the one desk of all routes into the state of the application."""
    if not hasattr(app.state, "desk"):
        edge = settings.edge
        desk = StateAccess(edge.state_folder, max_bytes=edge.state_max_bytes)
        app.state.desk = desk
        app.state.edge.metrics.state_writes_waiting.set_function(lambda: desk.num_waiting)


def desk_of(request: Request) -> StateAccess:
    return cast(StateAccess, request.app.state.desk)


def owner_of(request: Request) -> str:
    """Name of the key; without keys all callers are one owner."""
    return str(request.scope.get(KEY_NAME, ""))


def unix_time_s() -> int:
    return int(time.time())


_BOOT_S = time.time() - time.monotonic()


def settled_time_s() -> int:
    """Return the time by which things are old: by the clock, and no later than by that of the start."""
    return int(min(time.time(), time.monotonic() + _BOOT_S))


def page_asked(request: Request, *, default: int, most: int) -> ListPage:
    """Read `limit` and `after` of a list. Raises RequestRejected."""
    limit = whole_number(request.query_params, "limit", least=1, most=most, default=default)
    return ListPage(limit=limit, after=request.query_params.get("after"))


def page_reply(items: list[dict[str, Any]], page: ListPage) -> Response:
    """A list as OpenAI's API has it, of items that may be one more than the page holds."""
    return json_reply(page_body(items[: page.limit], has_more=len(items) > page.limit), NO_STORE)
