"""The viewers of the running engine: the web page and `tokenyard top`.

Owns: the lease by which the engine process sends views, and a short buffer for each viewer.
Never: reads a view (engine/core/step_watch.py), or lets a slow viewer hold memory: old views are dropped.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from engine.errors import Overloaded
from engine.process_messages import Watch

MAX_VIEWERS = 8
LEASE_S = 6.0
_RENEW_EVERY_S = 2.0
_BUFFERED_VIEWS = 4


class _Viewer:
    def __init__(self) -> None:
        self.views: deque[bytes] = deque(maxlen=_BUFFERED_VIEWS)
        self.has_news = asyncio.Event()


class Subscribers:
    """Viewers come and go; without any, the engine process is not asked."""

    def __init__(self, ask: Callable[[Watch], None]) -> None:
        self._ask = ask
        self._viewers: set[_Viewer] = set()
        self._asked_s = float("-inf")
        self._is_closed = False

    def show(self, document: bytes) -> None:
        """Hand a view to each viewer; one that has not taken its oldest view loses it."""
        for viewer in self._viewers:
            viewer.views.append(document)
            viewer.has_news.set()

    def close(self) -> None:
        """Let all viewers end."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.has_news.set()

    async def views(self) -> AsyncGenerator[bytes, None]:
        """Yield views; an empty one after each 2 s without any. Raises Overloaded with too many viewers."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers watch already; close one", retry_after_s=5.0)
        viewer = _Viewer()
        self._viewers.add(viewer)
        self._asked_s = float("-inf")
        try:
            while not self._is_closed:
                self._renew()
                try:
                    await asyncio.wait_for(viewer.has_news.wait(), _RENEW_EVERY_S)
                except TimeoutError:
                    yield b""
                    continue
                viewer.has_news.clear()
                while viewer.views:
                    yield viewer.views.popleft()
        finally:
            self._viewers.discard(viewer)

    def _renew(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s >= _RENEW_EVERY_S:
            self._asked_s = now_s
            self._ask(Watch(lease_s=LEASE_S))
