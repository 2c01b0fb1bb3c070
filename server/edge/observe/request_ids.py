"""One id per HTTP request: taken from x-request-id if it is harmless, else random; always returned.

Owns: the name that connects a client's complaint with our log, which is kept in the request's journal.
Never: the engine's request ids: two clients may send the same x-request-id.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.journal import Journal

_HEADER = b"x-request-id"
_JOURNAL = "tokenyard.journal"
_REPLY_HEADERS = "tokenyard.reply_headers"
_ERROR = "tokenyard.error"
_IGNORED = "tokenyard.ignored"
_HARMLESS = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")


class NotedError(NamedTuple):
    """An error as logs and operators see it: without a word of the request but the names of fields."""

    code: str = ""
    param: str = ""
    message: str = ""


NO_ERROR = NotedError()


class RequestIds:
    """ASGI middleware; must stand outside of everything that answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = id_for(scope["headers"])
        journal = scope[_JOURNAL] = Journal(request_id.decode("ascii"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (_HEADER, request_id), *_late_headers(scope)]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            journal.is_over = True


def new_request_id() -> str:
    return f"req_{secrets.token_hex(16)}"


def id_for(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the client's id, or a new one if it could break a log line or a header."""
    asked = next((value for name, value in headers if name == _HEADER), b"")
    return asked if _HARMLESS.fullmatch(asked) else new_request_id().encode()


def request_id_of(scope: Scope) -> str:
    return journal_of(scope).request_id


def journal_of(scope: Scope) -> Journal:
    """The journal of a request; outside of this middleware, one that is thrown away."""
    journal: Journal = scope.get(_JOURNAL) or Journal()
    return journal


def add_reply_headers(scope: Scope, make: Callable[[], Mapping[str, str]]) -> None:
    """Add headers to the reply, whatever it will be; `make` is called when it starts."""
    scope.setdefault(_REPLY_HEADERS, []).append(make)


def _late_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    makers: list[Callable[[], Mapping[str, str]]] = scope.get(_REPLY_HEADERS, [])
    return [(name.encode(), value.encode()) for make in makers for name, value in make().items()]


def ignored_of(scope: Scope) -> list[str]:
    """Names of what the request asked for in vain, to which more may be added."""
    names: list[str] = scope.setdefault(_IGNORED, [])
    return names


def note_error(scope: Scope, error: NotedError) -> None:
    """Keep the error that the client received, in a reply or in a stream."""
    scope[_ERROR] = error


def error_of(scope: Scope) -> NotedError:
    """The request's error; one of empty texts if there was none."""
    error: NotedError = scope.get(_ERROR, NO_ERROR)
    return error
