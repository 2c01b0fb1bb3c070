"""Errors to replies, in one place.

Owns: the errors that are found at the edge itself, and the code of every error; status and headers follow
from its row of the catalogue.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineDiedTwice,
    EngineError,
    EngineUnavailable,
    Overloaded,
    RequestFailed,
    RequestRejected,
    TenantOverloaded,
)
from server.edge.error_catalogue import CATALOGUE, Entry, Retry
from server.edge.observe.request_ids import NotedError, note_error, request_id_of

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 400
"""A message quotes the caller's input here and there; it must not grow with it."""
MAX_NOTED_CHARS = 100
_OTHERS_WORDS = re.compile(r": | \(")
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?""")


class EdgeError(Exception):
    """An error found before the engine was asked. Its text may be shown to the caller."""

    param: str | None = None


class ModelNotFound(EdgeError):
    """No model is served under the name that the request asks for."""

    param = "model"


class RouteNotFound(EdgeError):
    """There is nothing at this path."""


class ResponseNotFound(EdgeError):
    """The response was never stored, or no longer is, or another key's: the reply does not say which."""

    def __init__(self, its_id: str, kind: str = "Response") -> None:
        super().__init__(f"{kind} with id {its_id[:128]!r} not found: none is stored under it")


class ObjectNotFound(EdgeError):
    """The file or batch was never there, no longer is, or is another key's: the reply does not say which."""

    def __init__(self, kind: str, object_id: str) -> None:
        super().__init__(f"there is no {kind} {object_id[:128]!r}")


class MethodNotAllowed(EdgeError):
    """The path exists, the method does not."""

    def __init__(self, allowed: str) -> None:
        super().__init__(f"method not allowed here; use {allowed}")
        self.allowed = allowed


class UnsupportedMediaType(EdgeError):
    """The body does not claim to be JSON."""


class BodyTooLarge(EdgeError):
    """More bytes than the operator allows."""


class BodyTimeout(EdgeError):
    """The body stopped coming."""


class HeadTimeout(EdgeError):
    """A request was begun, and its head stopped coming."""


class TooManyConnections(EdgeError):
    """Every place for a connection is taken; the reserve is for probes only."""

    def __init__(self) -> None:
        super().__init__("this server holds as many connections as it can; try again later")


class HeadTooLarge(EdgeError):
    """The request line and the headers exceed the bytes that are read before a key is known."""


class LowMemory(EdgeError):
    """The memory of this machine, or within one of its limits, is nearly used up, or is."""

    def __init__(self) -> None:
        super().__init__("this server has hardly any memory left; try again later")


class InvalidApiKey(EdgeError):
    """No key, or not one of ours."""


class NotPermitted(EdgeError):
    """The key is known, and may not do this."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ForeignPage(EdgeError):
    """A web page of another origin asks a server that has no keys."""

    def __init__(self) -> None:
        super().__init__(
            "this server needs no key, and so answers no web pages of other origins; name the page's origin"
            " with --cors-origin, or set an API key"
        )


class ForeignHost(EdgeError):
    """A server without keys is addressed by a name that anyone may have let point to it."""

    def __init__(self, name: str) -> None:
        super().__init__(
            "this server needs no key, and so answers to no name that a stranger may own; allow it with"
            f" --allowed-host {name}, or set an API key"
        )


class TooManyOfOneKey(EdgeError):
    """The key has its maximum number of requests under way."""

    def __init__(self, *, limit: int, retry_after_s: float) -> None:
        super().__init__(f"this key may have {limit} requests under way; wait until one of them has ended")
        self.retry_after_s = retry_after_s


class RateLimited(EdgeError):
    """The key has used the requests or tokens of this minute."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


_CODES: dict[type[Exception], str | None] = {
    RequestRejected: None,
    InvalidApiKey: "invalid_api_key",
    NotPermitted: "not_permitted",
    ForeignPage: "origin_not_allowed",
    ForeignHost: "host_not_allowed",
    TooManyOfOneKey: "rate_limit_exceeded",
    RateLimited: "rate_limit_exceeded",
    HeadTooLarge: "head_too_large",
    LowMemory: "low_memory",
    ModelNotFound: "model_not_found",
    ResponseNotFound: "response_not_found",
    ObjectNotFound: "object_not_found",
    RouteNotFound: "not_found",
    MethodNotAllowed: "method_not_allowed",
    BodyTimeout: "request_timeout",
    HeadTimeout: "request_timeout",
    BodyTooLarge: "request_too_large",
    UnsupportedMediaType: "unsupported_media_type",
    Overloaded: "server_overloaded",
    TenantOverloaded: "rate_limit_exceeded",
    ClientDisconnect: "client_closed",  # read by no client: it gives the counters and the log a status
    RequestFailed: "model_error",
    EngineDied: "engine_restarted",
    EngineDiedTwice: "engine_died_twice",
    EngineError: "engine_error",
    DeadlineExceeded: "deadline_exceeded",
    EngineUnavailable: None,
    TooManyConnections: "too_many_connections",
    Exception: "internal_error",
}
"""The code of each type of error; None where the error brings one of several itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """An error as the client sees it."""

    status: int
    message: str
    type: str
    param: str | None
    code: str
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object; the same in a reply and as an event of a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


ErrorShape = Callable[[ErrorReply], dict[str, Any]]
"""An error object in the words of one protocol."""


def shape_at(path: str, shapes: Mapping[str, ErrorShape]) -> ErrorShape:
    """The shape of errors at a path; `shapes` are by the beginning of paths: `/api` has all of `/api/...`."""
    found = (shape for start, shape in shapes.items() if f"{path}/".startswith(f"{start}/"))
    return next(found, ErrorReply.body)


def noted(reply: ErrorReply) -> NotedError:
    """Code, field and our own words, for logs and operators.

    Quoted words, and what stands behind a colon or in brackets, may be the client's, or a template's.
    """
    words = reply.message.removeprefix(f"{reply.param}: ")
    words = _QUOTED.sub("…", _OTHERS_WORDS.split(words, maxsplit=1)[0])
    return NotedError(reply.code, (reply.param or "")[:MAX_NOTED_CHARS], words[:MAX_NOTED_CHARS])


def describe(error: Exception, request_id: str) -> ErrorReply:
    """Find the error's row, most specific type first. Never raises: every exception has a row."""
    if isinstance(error, HTTPException):
        error = _from_router(error)
    elif isinstance(error, MemoryError):
        error = LowMemory()
    code = _code_of(error)
    entry = CATALOGUE[code]
    message = str(error)
    if entry.fixed_text:
        message = f"{entry.fixed_text}; quote request id {request_id} when you report it"
    return ErrorReply(
        status=entry.status,
        message=_shortened(message),
        type=entry.type,
        param=getattr(error, "param", None),
        code=code,
        headers=_headers(entry, error),
    )


def _code_of(error: Exception) -> str:
    """Every code is in the catalogue (a test checks it); a reply is made even if not."""
    code = next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    code = code or str(getattr(error, "code", ""))
    if code in CATALOGUE:
        return code
    return "invalid_value" if isinstance(error, RequestRejected) else "internal_error"


def _from_router(error: HTTPException) -> EdgeError | RequestRejected:
    if error.status_code == 404:
        return RouteNotFound("there is nothing at this path; see /openapi.json for what there is")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return MethodNotAllowed(", ".join(sorted(allowed.split(", "))))  # the router keeps a set
    return RequestRejected("the request could not be read", code="invalid_request")


def _headers(entry: Entry, error: Exception) -> dict[str, str]:
    headers = _retry_headers(entry.retry, error)
    if entry.header is not None:
        headers.update([entry.header])
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    return headers


def _retry_headers(retry: Retry, error: Exception) -> dict[str, str]:
    if retry is Retry.LATER:
        wait_s = max(0.0, getattr(error, "retry_after_s", 1.0))
        # Retry-After knows whole seconds only, and 0 would invite a storm.
        return {
            "retry-after": str(max(1, math.ceil(wait_s))),
            "retry-after-ms": str(math.ceil(wait_s * 1000)),
        }
    return {"x-should-retry": "false" if retry is Retry.NEVER else "true"}


def _shortened(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…"


def log_failure(error: Exception, reply: ErrorReply, request_id: str) -> None:
    """Log the details that a 500 hides from the client. Milder errors are only counted."""
    if reply.status != 500:
        return
    # An engine error was raised on purpose and explains itself; other errors need their stack.
    # The text of such a one stays out: it may quote the request.
    if isinstance(error, EngineError):
        # Behind a colon others speak: the library for grammars, of the grammar.
        what = str(error).partition(":")[0]
        log.error("request %s failed: %s: %s", request_id, type(error).__name__, what)
    else:
        log.error("request %s failed: %s", request_id, type(error).__name__, exc_info=error)


def reply_of(error: Exception, scope: Scope, count: Callable[[str], None]) -> ErrorReply:
    """Describe, log, keep and count the error of a request."""
    reply = describe(error, request_id_of(scope))
    log_failure(error, reply, request_id_of(scope))
    note_error(scope, noted(reply))
    count(reply.code)
    return reply


class ErrorBoundary:
    """The outermost handler: below it anything may raise, above it there are only replies."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        count: Callable[[str], None] = lambda _: None,
        shapes: Mapping[str, ErrorShape] | None = None,
    ) -> None:
        """Call `count` with the code of every error; `shapes` are by beginnings of paths (`shape_at`)."""
        self._app = app
        self._count = count
        self._shapes = shapes or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            reply = reply_of(error, scope, self._count)
            if has_started:
                # Half a reply is on its way: only cutting the connection can show that to the client.
                raise
            shape = shape_at(scope.get("path", ""), self._shapes)
            await error_response(reply, shape)(scope, receive, send)


def error_response(reply: ErrorReply, shape: ErrorShape = ErrorReply.body) -> Response:
    return Response(
        orjson.dumps(shape(reply)),
        status_code=reply.status,
        headers=reply.headers,
        media_type="application/json",
    )
