"""A client of an application in the same process: the whole edge, and no port."""

from starlette.types import ASGIApp, Message, Scope

from server.edge.access.sent_key import OWNER_NAME
from server.edge.http.disconnect import stay_connected
from server.edge.http.http_client import ExchangeFailed, Reply


class AppClient:
    """Sends requests to `app` without a socket."""

    def __init__(self, app: ASGIApp, *, owner: str | None = None) -> None:
        """Send as the key named `owner`; None: as a caller from outside without one."""
        self._app = app
        self._owner = owner

    async def post(self, path: str, body: bytes) -> Reply:
        """Return the reply; cancelling aborts it. Raises ExchangeFailed if the app ends without one."""
        unread = [body]
        head: Message = {}
        pieces: list[bytes] = []

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await stay_connected()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            else:
                pieces.append(message.get("body", b""))

        scope = _scope(path, len(body))
        if self._owner is not None:
            scope[OWNER_NAME] = self._owner
        await self._app(scope, receive, send)
        if not head:
            raise ExchangeFailed("no reply", "the application ended without a reply")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in head["headers"]}
        return Reply(status=head["status"], headers=headers, body=b"".join(pieces))


def _scope(path: str, num_bytes: int) -> Scope:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(num_bytes).encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }
