"""The one table from what went wrong to what the client is told.

Owns: the errors that are found at the edge itself, and for every error its status, OpenAI type and code,
and the headers that tell a client whether trying again can help.
Never: the decision that something is wrong (translate.py, json_body.py, auth.py, the engine).
Source: OpenAI's error object; x-should-retry and retry-after-ms are what its SDKs obey.
"""

import logging
import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineError,
    EngineUnavailable,
    Overloaded,
    RequestFailed,
    RequestRejected,
)
from server.request_ids import request_id_of

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 400
"""A message quotes the caller's input here and there; it must not grow with it."""


class EdgeError(Exception):
    """Found before the engine was asked. Its text is fit for the caller's eyes."""

    param: str | None = None


class ModelNotFound(EdgeError):
    """No model is served under the name that the request asks for."""

    param = "model"


class RouteNotFound(EdgeError):
    """There is nothing at this path."""


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
    """Every place is taken; the reserve is for probes."""

    def __init__(self) -> None:
        super().__init__("this server holds as many connections as it can; try again later")


class InvalidApiKey(EdgeError):
    """No key, or not one of ours."""


class ReplyAborted(EdgeError):
    """The engine gave the request up while the client still waited: the server is being shut down."""


class Retry(Enum):
    """What a client is told about trying the same request again."""

    NEVER = auto()
    """It would end the same way."""
    NOW = auto()
    LATER = auto()
    """After the time in Retry-After."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of the table. A code of None is taken from the error."""

    status: int
    type: str
    code: str | None
    retry: Retry
    header: tuple[str, str] | None = None


_WHO_ARE_YOU = ("www-authenticate", 'Bearer realm="tokenyard"')
_HANG_UP = ("connection", "close")
"""What else the client may have sent is never read, so that the connection cannot be used again."""

_SHAPES: dict[type[Exception], Shape] = {
    RequestRejected: Shape(400, "invalid_request_error", None, Retry.NEVER),
    InvalidApiKey: Shape(401, "invalid_request_error", "invalid_api_key", Retry.NEVER, _WHO_ARE_YOU),
    ModelNotFound: Shape(404, "invalid_request_error", "model_not_found", Retry.NEVER),
    RouteNotFound: Shape(404, "invalid_request_error", "not_found", Retry.NEVER),
    MethodNotAllowed: Shape(405, "invalid_request_error", "method_not_allowed", Retry.NEVER),
    BodyTimeout: Shape(408, "invalid_request_error", "request_timeout", Retry.NOW, _HANG_UP),
    HeadTimeout: Shape(408, "invalid_request_error", "request_timeout", Retry.NOW, _HANG_UP),
    BodyTooLarge: Shape(413, "invalid_request_error", "request_too_large", Retry.NEVER, _HANG_UP),
    UnsupportedMediaType: Shape(415, "invalid_request_error", "unsupported_media_type", Retry.NEVER),
    Overloaded: Shape(429, "rate_limit_error", "server_overloaded", Retry.LATER),
    # Nobody reads this one: it gives the counters and the log a status.
    ClientDisconnect: Shape(499, "invalid_request_error", "client_closed", Retry.NOW),
    RequestFailed: Shape(500, "server_error", "model_error", Retry.NEVER),
    EngineDied: Shape(500, "server_error", "engine_restarted", Retry.NOW),
    EngineError: Shape(500, "server_error", "engine_error", Retry.NEVER),
    DeadlineExceeded: Shape(504, "timeout_error", "deadline_exceeded", Retry.NEVER),
    EngineUnavailable: Shape(503, "server_error", None, Retry.LATER),
    TooManyConnections: Shape(503, "server_error", "too_many_connections", Retry.LATER, _HANG_UP),
    ReplyAborted: Shape(503, "server_error", "shutting_down", Retry.LATER),
    Exception: Shape(500, "server_error", "internal_error", Retry.NEVER),
}

_FIXED_TEXT = {
    "model_error": "the model failed on this request",
    "engine_restarted": "the engine stopped while it worked on this request",
    "engine_error": "the engine failed on this request",
    "internal_error": "the server failed on this request",
}
"""What a 500 says: details are for the log, the request id connects the two."""


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


def describe(error: Exception, request_id: str) -> ErrorReply:
    """Find the error's row, most specific type first. Never raises: every exception has a row."""
    if isinstance(error, HTTPException):
        error = _from_router(error)
    shape = next(_SHAPES[kind] for kind in type(error).__mro__ if kind in _SHAPES)
    code = shape.code or str(getattr(error, "code", "invalid_value"))
    message = str(error)
    if code in _FIXED_TEXT:
        message = f"{_FIXED_TEXT[code]}; quote request id {request_id} when you report it"
    return ErrorReply(
        status=shape.status,
        message=_shortened(message),
        type=shape.type,
        param=getattr(error, "param", None),
        code=code,
        headers=_headers(shape, error),
    )


def _from_router(error: HTTPException) -> EdgeError | RequestRejected:
    """Take the words of the routing layer into our own."""
    if error.status_code == 404:
        return RouteNotFound("there is nothing at this path; see /openapi.json for what there is")
    if error.status_code == 405:
        return MethodNotAllowed((error.headers or {}).get("Allow", "another method"))
    return RequestRejected("the request could not be read", code="invalid_request")


def _headers(shape: Shape, error: Exception) -> dict[str, str]:
    headers = _retry_headers(shape.retry, error)
    if shape.header is not None:
        headers[shape.header[0]] = shape.header[1]
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
    """Keep what a 500 hides from the client. Everything milder is only counted."""
    if reply.status != 500:
        return
    # An engine error was raised on purpose and explains itself; anything else needs its stack.
    trace = None if isinstance(error, EngineError) else error
    log.error("request %s failed: %s: %s", request_id, type(error).__name__, error, exc_info=trace)


class ErrorBoundary:
    """The outermost handler: below it anything may raise, above it there are only replies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            reply = describe(error, request_id_of(scope))
            log_failure(error, reply, request_id_of(scope))
            if has_started:
                # Half a reply is on its way: only cutting the connection tells the client so.
                raise
            await error_response(reply)(scope, receive, send)


def error_response(reply: ErrorReply) -> Response:
    """The whole HTTP reply for an error."""
    return Response(
        orjson.dumps(reply.body()),
        status_code=reply.status,
        headers=reply.headers,
        media_type="application/json",
    )
