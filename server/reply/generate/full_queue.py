"""Refusals of requests for which the queue has no room, before they are requests.

Owns: the check of a head that was just parsed, and the bytes of the refusal.
Never: whether there is room (engine/frontend/active_requests.py), or the words (error_catalogue.py).

Under a crowd refusals are most of the work of the API process, and slow the requests that are served. All
layers, the router and a task of its own cost as much as accepting the connection does. A request is refused
here only if the layers would refuse it with the same words; in doubt the layers decide.
"""

import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

import orjson

from engine.errors import Overloaded
from server.edge.access.key_ring import KeyRing
from server.edge.error_replies import ErrorShape, describe, noted, shape_at
from server.edge.http.edge import Edge
from server.edge.http.request_log import record_refusal
from server.edge.http.strict_http import Head, plain_head
from server.edge.observe.request_ids import NotedError, id_for
from server.edge.observe.spans import NoSpans
from server.edge.sockets.early_refusal import EarlyRefusal

_ASKS_FOR_MORE = (b"x-tokenyard-", b"x-priority", b"origin")
"""Beginnings of fields that decide about the priority, add to the reply, or are refused by themselves."""
_BEARER = b"bearer "
_SAME_S = 0.02
"""Seconds in which refusals have the same words and the same time to try again."""
_LIKELY_S = 1.0
"""Seconds after a refusal in which newcomers are looked at before they have a connection."""


class _Told(NamedTuple):
    """A refusal but for its request id."""

    until_s: float
    before_id: bytes
    after_id: bytes
    error: NotedError


class FullQueue:
    """The check of one application."""

    def __init__(
        self, edge: Edge, keys: KeyRing, *, paths: frozenset[str], shapes: Mapping[str, ErrorShape]
    ) -> None:
        """`paths` are of requests that wait in the queue; `shapes` of errors, where not OpenAI's."""
        self._engine = edge.engine
        self._metrics = edge.metrics
        self._is_on = isinstance(edge.spans, NoSpans)  # a trace shows every request
        self._keys = keys
        self._paths = {path.encode(): path for path in paths}
        self._shapes = shapes
        self._refused_s = float("-inf")
        self._told: dict[tuple[str, int | None], _Told] = {}
        """The last refusals, by path and priority."""

    @property
    def are_likely(self) -> bool:
        return time.monotonic() - self._refused_s < _LIKELY_S

    def of_bytes(self, seen: bytes) -> EarlyRefusal | None:
        head = plain_head(seen)
        reply = None if head is None else self.refusal_of(head)
        return None if head is None or reply is None else EarlyRefusal(reply, head.num_bytes)

    def refusal_of(self, head: Head) -> bytes | None:
        """Return the whole reply, after which the connection ends; None: the layers decide."""
        path = self._paths.get(head.target)
        if path is None or head.method != b"POST" or not self._is_on:
            return None
        headers = [*head.headers]
        if any(name.startswith(_ASKS_FOR_MORE) for name, _ in headers):
            return None
        priority = None
        if self._keys.is_locked:
            given = [value for name, value in headers if name == b"authorization"]
            is_bearer = len(given) == 1 and given[0][: len(_BEARER)].lower() == _BEARER
            key = self._keys.find(given[0][len(_BEARER) :].strip()) if is_bearer else None
            if key is None or key.max_concurrent_requests is not None:
                return None
            priority = key.most_urgent_priority
        try:
            self._engine.require_any_room(priority)
        except Overloaded as error:
            now_s = self._refused_s = time.monotonic()
            told = self._told.get((path, priority))
            if told is None or told.until_s < now_s:
                told = _told(error, shape_at(path, self._shapes), until_s=now_s + _SAME_S)
                self._told[path, priority] = told
            request_id = id_for(headers)
            record_refusal(self._metrics, path, told.error, request_id.decode("ascii"))
            return told.before_id + request_id + told.after_id
        return None


def _told(error: Overloaded, shape: ErrorShape, *, until_s: float) -> _Told:
    reply = describe(error, "")
    body = orjson.dumps(shape(reply))
    headers = {
        "date": formatdate(usegmt=True),
        **reply.headers,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": "",
    }
    lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return _Told(until_s, "\r\n".join(lines).encode("ascii"), b"\r\n\r\n" + body, noted(reply))
