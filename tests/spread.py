"""Spreads test files over the processes of pytest-xdist (`-n 3 --dist loadfile`).

Owns: which files run in one process, and a count of what is left that does not grow with what is done.
Never: which tests run (tests/tiers.py).
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.tiers import process_of


class _Places(list[str]):
    """Names of tests, whose places are looked up instead of searched for."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self._places = {name: place for place, name in enumerate(names)}

    def index(self, name: str, *_: Any) -> int:
        return self._places[name]


class Spread(LoadFileScheduling):
    """The usual spreading by file, with those together that share what takes long to start."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._scope_of = cache(lambda file: process_of(file, Path(config.rootpath, file).read_text()))

    def _split_scope(self, nodeid: str) -> str:
        return self._scope_of(super()._split_scope(nodeid))

    def add_node_collection(self, node: Any, collection: Any) -> None:
        super().add_node_collection(node, collection)
        if node in self.registered_collections:
            self.registered_collections[node] = _Places(self.registered_collections[node])

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        nodeid = self.registered_collections[node][item_index]
        units, scope = self.assigned_work[node], self._split_scope(nodeid)
        del units[scope][nodeid]
        if not units[scope]:
            del units[scope]
        self._reschedule(node)
