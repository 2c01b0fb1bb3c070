"""One line of the log, one span and one count for each HTTP request, when it is over.

Owns: the facts that are recorded, and the level. One place for all three, which record the same. Names of
routes are a fixed set, looked up without the router: a request that is refused before it has one as well, and
no client can make a new one.
Never: prompts, outputs, headers, bodies, or a path as the client wrote it: the name of its route is enough.
"""

import logging
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.journal import Journal
from engine.logs.lines import fields
from engine.logs.rare_log import RareLog
from server.edge.access.sent_key import KEY_NAME
from server.edge.observe.http_metrics import OWN_LIMIT, HttpMetrics, RecentError
from server.edge.observe.request_ids import NotedError, error_of, ignored_of, journal_of
from server.edge.observe.spans import NoSpans, Spans, trace_context_of

log = logging.getLogger(__name__)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_CLIENT_LEFT = 499
"""Status as in nginx's log: the client hung up before one was sent."""
_FIRST_ERROR = 400
_TOO_LATE = 504
_NO_SPANS = NoSpans()
_OVERLOADED = "server_overloaded"

_refused = RareLog(log, logging.INFO, "requests refused as the queue is full: %d; each is a line at debug")


UNMATCHED = "unmatched"


class RouteNames:
    """Lookup of a path's name among the declared routes: `/v1/models/{model}`."""

    def __init__(self, routes: Iterable[str]) -> None:
        routes = tuple(routes)
        self._exact = frozenset(route for route in routes if "{" not in route)
        self._patterns = {_ends(route): route for route in routes if "{" in route}

    def of(self, path: str) -> str:
        if path in self._exact:
            return path
        fitting = [
            (len(suffix), route)
            for (prefix, suffix), route in self._patterns.items()
            if path.startswith(prefix) and path.endswith(suffix)
        ]
        return max(fitting, default=(0, UNMATCHED))[1]


def _ends(route: str) -> tuple[str, str]:
    """The text before the one parameter of a path, and the text after it."""
    prefix, _, rest = route.partition("{")
    return prefix, rest.partition("}")[2]


class RequestLog:
    """ASGI middleware, inside of the request ids and outside of everything that answers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Iterable[str],
        probes: frozenset[str],
        polled: frozenset[str] = frozenset(),
        spans: Spans,
        metrics: HttpMetrics,
    ) -> None:
        self._app = app
        self._probes = probes
        self._polled = polled
        self._metrics = metrics
        self._routes = RouteNames(routes)
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = _CLIENT_LEFT

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began_s = time.monotonic()
        is_probe = scope["path"] in self._probes
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = self._routes.of(scope["path"])
        journal = journal_of(scope)
        # Probes and scrapes come several times a second, and are not traced.
        spans = _NO_SPANS if is_probe else self._spans
        span = spans.begin(method, route, trace_context_of(scope["headers"]))
        journal.trace_id = span.trace_id
        try:
            await self._app(scope, receive, watched_send)
        finally:
            total_s = time.monotonic() - began_s
            limit = OWN_LIMIT if status == _TOO_LATE and journal.own_limit_ran_out else ""
            self._metrics.count_request(method, route, status, limit=limit)
            error = error_of(scope)
            if error.code:
                self._metrics.recent_errors.append(
                    RecentError(time.time(), method, route, status, *error, journal.request_id)
                )
            span.end(journal, status=status, error_code=error.code)
            if error.code == _OVERLOADED:
                _refused.note()
            # A poll that was answered says nothing; one that was refused does.
            is_quiet = is_probe or (scope["path"] in self._polled and status < _FIRST_ERROR)
            level = logging.DEBUG if is_quiet or error.code == _OVERLOADED else logging.INFO
            if log.isEnabledFor(level):
                facts = fields(
                    **_facts_of(scope, journal),
                    method=method,
                    route=route,
                    status=status,
                    total_s=round(total_s, 6),
                )
                log.log(level, "request", extra=facts)


def record_refusal(metrics: HttpMetrics, route: str, error: NotedError, request_id: str) -> None:
    """Record a POST that was refused with 429 as the queue is full, before it was a request."""
    status = 429
    metrics.count_request("POST", route, status)
    metrics.count_error(error.code)
    metrics.recent_errors.append(RecentError(time.time(), "POST", route, status, *error, request_id))
    _refused.note()
    if log.isEnabledFor(logging.DEBUG):
        facts = fields(request_id=request_id, error=error.code, method="POST", route=route, status=status)
        log.debug("request", extra=facts)


def _facts_of(scope: Scope, journal: Journal) -> dict[str, str | int | float | None]:
    """Facts that are known about a request at its end, early or late."""
    error = error_of(scope)
    facts: dict[str, str | int | float | None] = {
        "request_id": journal.request_id,
        "trace_id": journal.trace_id,
        "reply_id": journal.reply_id,
        "model": journal.model,
        "key": scope.get(KEY_NAME),
        "tenant": journal.tenant if journal.tenant != scope.get(KEY_NAME) else None,
        "error": error.code,
        "error_param": error.param,
        "error_message": error.message,
        "ignored": ", ".join(ignored_of(scope)),
    }
    if journal.was_admitted:
        facts |= {
            "finish_reason": ",".join(dict.fromkeys(journal.finish_reasons)),
            "aborted_by": journal.abort_cause,
            "priority": journal.priority,
            "prompt_tokens": journal.num_prompt_tokens,
            "cached_tokens": journal.num_cached_tokens,
            "lost_tokens": journal.num_lost_tokens or None,
            "lost_to": journal.lost_to,
            "output_tokens": journal.num_output_tokens,
            "preemptions": journal.num_preemptions,
            "queue_s": _rounded(journal.queue_s),
            "first_token_s": _rounded(journal.first_token_s),
        }
    return facts


def _rounded(seconds: float | None) -> float | None:
    """Round to microseconds: more digits are noise."""
    return None if seconds is None else round(seconds, 6)
