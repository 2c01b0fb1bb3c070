"""The viewers of the running engine: the web page and `tokenyard top`.

Owns: the lease by which the engine process sends views, a short buffer for each viewer, and views of several
engines joined into one. Sequence ids are unique over all; blocks are numbered one engine after the other; the
steps of a joined view are those of the engine whose view came last.
Never: makes a view (engine/core/step_watch.py), or lets a slow viewer hold memory: old views are dropped.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson

from engine.errors import Overloaded
from engine.process_messages import Watch

MAX_VIEWERS = 8
LEASE_S = 6.0
_RENEW_EVERY_S = 2.0
_BUFFERED_VIEWS = 4
_FREE = 0


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


class JoinedViews:
    """The views. Of one engine they pass as they are."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._last: dict[int, dict[str, Any]] = {}
        self._num_views = 0

    def join(self, engine: int, document: bytes) -> bytes:
        """Return the view of all engines, with this newest one of them."""
        if self._num_engines == 1:
            return document
        view = orjson.loads(document)
        self._last[engine] = view
        self._num_views += 1
        parts = [self._last[number] for number in sorted(self._last)]
        joined = {
            **view,
            "view": self._num_views,
            "num_engines": self._num_engines,
            "running": [report for part in parts for report in part["running"]],
            "waiting": [report for part in parts for report in part["waiting"]],
            "groups": _sum_groups([part["groups"] for part in parts]),
            "blocks": [run for part in parts for run in _all_blocks(part)],
            "max_num_seqs": sum(part["max_num_seqs"] for part in parts),
            "stats": _sum([part["stats"] for part in parts]),
        }
        return orjson.dumps(joined)

    def forget(self, engine: int) -> None:
        """Leave an engine that is gone out of the next views."""
        self._last.pop(engine, None)


def _all_blocks(view: dict[str, Any]) -> list[list[int]]:
    """Runs of all blocks of an engine: ones that the view left out count as free."""
    runs: list[list[int]] = view["blocks"]
    num_left_out = view["stats"]["num_blocks"] - sum(run[0] for run in runs)
    return [*runs, [num_left_out, _FREE, 0]] if num_left_out else runs


def _sum_groups(parts: list[list[list[Any]]]) -> list[list[Any]]:
    """Add up the blocks of each group, over engines of one model."""
    together = [list(zip(*of_engines, strict=True)) for of_engines in zip(*parts, strict=True)]
    return [[names[0], *map(sum, nums)] for names, *nums in together]


def _sum(stats: list[dict[str, Any]]) -> dict[str, Any]:
    busiest = max(stats, key=lambda each: int(each["num_waiting"]))
    total = {name: sum(each[name] for each in stats) for name in busiest if name != "wait_reason"}
    return {**total, "wait_reason": busiest["wait_reason"]}
