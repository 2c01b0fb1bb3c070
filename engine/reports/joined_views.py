"""Views of several engines, joined into views of one, for the web page and `tokenyard top`.

Owns: the last view of each engine. Sequence ids are unique over all; blocks are numbered one engine after the
other; the steps of a joined view are those of the engine whose view came last.
Never: makes a view (engine/core/step_watch.py).
"""

from typing import Any

import orjson

_FREE = 0


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


def _sum(stats: list[dict[str, Any]]) -> dict[str, Any]:
    busiest = max(stats, key=lambda each: int(each["num_waiting"]))
    total = {name: sum(each[name] for each in stats) for name in busiest if name != "wait_reason"}
    return {**total, "wait_reason": busiest["wait_reason"]}
